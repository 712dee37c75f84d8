"""The contract of an engine, held to our CPU engine in every test run and to real vLLM by ``make test-vllm``."""
