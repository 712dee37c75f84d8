"""Ports to the inference engines."""
