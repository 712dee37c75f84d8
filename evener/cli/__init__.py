"""The `evener` command."""
