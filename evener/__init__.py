"""Evener: trains one open-weights policy inside the coding agents people really use."""
