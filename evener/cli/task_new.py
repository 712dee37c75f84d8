"""A new task is a copy of a small whole one (`new_task/`) and passes its check as it stands; nothing is ever overwritten.

Called by `evener tasks new`.
"""

import shutil
from pathlib import Path

from evener.errors import InputError

TEMPLATE = Path(__file__).parent / "new_task"


def scaffold(folder: Path) -> list[Path]:
    """Write a task into ``folder``, which must be new or empty; the files. Raises InputError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("task_invalid", f"{folder}: exists and is not an empty folder")
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True)
    except OSError as error:
        raise InputError("task_invalid", f"{folder}: {error}") from error
    return sorted(path for path in folder.rglob("*") if path.is_file())
