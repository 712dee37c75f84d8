"""A folder is removed whatever is in it, closed folders and folders within folders by the thousand; no link is followed.

Called for what a sandbox leaves.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path


def remove(path: Path) -> None:
    """Remove a folder and all below it. Idempotent. Raises OSError."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except PermissionError:  # a user's own sandbox closed a folder to its owner
        _open_up(path)
        shutil.rmtree(path)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", path], check=True)


def _open_up(folder: Path) -> None:
    folder.chmod(stat.S_IRWXU)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            _open_up(Path(entry.path))
