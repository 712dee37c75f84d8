"""The HTTP side: one router an object; a request is one transaction."""
