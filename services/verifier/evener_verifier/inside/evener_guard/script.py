"""The guard of a script of the tests that may use no test runner at all; see the package."""

import atexit

from .line import opened


def watch() -> None:
    """Say at the end that it was reached; exit handlers run in reverse order, so this is the last."""
    line = opened("script")
    if line is not None:
        line.note(whole=False)
        atexit.register(line.close, 0, end=False)
