"""The rival lives in a virtual environment of its own, made on the first run and kept in the cache."""

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = "openenv==0.10.0"


class RivalMissing(Exception):
    """The rival cannot be installed here, so that there is nothing to measure beside."""


def python() -> Path:
    """The Python of the rival's environment, installed where it is not yet. Raises RivalMissing."""
    cache = Path(os.environ.get("EVENER_CACHE", "~/.cache/evener")).expanduser()
    place = cache / "rivals" / PACKAGE.replace("==", "-")
    found = place / "bin" / "python"
    done = place / "installed"
    if done.is_file():
        return found
    print(f"installing {PACKAGE} into {place}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", str(place)])
    _run([str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE])
    done.touch()
    return found


def _run(argv: list[str]) -> None:
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RivalMissing(
            f"`{' '.join(argv)}` failed, and without {PACKAGE} there is nothing to compare with:\n{ended.stderr[-1500:]}"
        )
