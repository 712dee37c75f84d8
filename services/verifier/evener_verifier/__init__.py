"""The verifier: scores a snapshot in a fresh sandbox with tests the agent never saw."""
