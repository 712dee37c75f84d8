"""Measures our proxy beside OpenEnv's capture proxy, both in the same minutes on the same machine: `python -m bench.proxy`."""
