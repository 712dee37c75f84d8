"""The wire formats that agents speak; one module each, and no other module knows one."""
