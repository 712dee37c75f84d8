"""Tests: unit (one part alone), contract (every back end of a port), integration and e2e (several parts)."""
