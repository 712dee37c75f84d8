"""Under the ``process`` sandbox the folders of the Harbor format are elsewhere: their own words are made to say where.

Only for the user's own tests and solutions, which are text. Called by the verifier and by `oracle`.
"""

import re
from collections.abc import Callable
from pathlib import Path

_PLACES = re.compile(rb"(?<![\w./-])/(?:logs/verifier|tests|solution|workspace|home/agent)(?![\w.-])")


def rewrite(folder: Path, locate: Callable[[str], str]) -> None:
    """Replace the places of the format in every text file below ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if b"\0" not in content:
                path.write_bytes(text(content, locate))


def text(content: bytes, locate: Callable[[str], str]) -> bytes:
    """The same with the places replaced."""
    return _PLACES.sub(lambda match: locate(match[0].decode()).encode(), content)
