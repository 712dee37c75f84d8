"""The CPU engine: speaks the part of the vLLM wire format that Evener uses, for laptops and tests."""
