"""Unmodified agents through the running proxy, in the runner's sandbox, against an engine that follows a script."""
