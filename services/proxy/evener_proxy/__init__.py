"""The proxy: what an agent talks to; it captures what the engine sampled, and a key can only sample."""
