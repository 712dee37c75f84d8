"""A word that comes too late changes nothing: it is refused, and whoever said it drops what it holds."""


class Conflict(Exception):
    """Another holds the lease, the epoch is old, or the object is past that state. The API answers 409 with the text."""
