"""Attacks on a score, as real workspaces against both tiers of the verifier, and honest solutions beside them."""
