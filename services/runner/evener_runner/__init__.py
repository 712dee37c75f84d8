"""The runner: runs one unmodified agent per attempt in a sandbox whose only way out is the proxy."""
