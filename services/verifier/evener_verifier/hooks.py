"""Files that a tool runs or obeys by their mere presence, so that tests which never heard of them would be changed by them.

In the in-process tier the workspace is graded without those that its agent made or changed. Called by `workspace`.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import PurePosixPath

_NAMES = {
    "conftest.py": "pytest runs it",
    "pytest.ini": "pytest obeys it",
    ".pytest.ini": "pytest obeys it",
    "sitecustomize.py": "Python runs it at its start",
    "usercustomize.py": "Python runs it at its start",
    ".pdbrc": "Python's debugger runs it",
    ".bashrc": "a shell runs it",
    ".bash_profile": "a shell runs it",
    ".bash_login": "a shell runs it",
    ".profile": "a shell runs it",
    ".zshrc": "a shell runs it",
    ".zshenv": "a shell runs it",
    ".gitconfig": "git obeys it",
}
_RUNNERS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "unittest", "coverage", "nose")
"""Modules at the top of the workspace that would be imported in place of the tests' own tools."""
_SECTION = re.compile(rb"^\s*\[\s*(?:tool:)?pytest\s*\]", re.MULTILINE)


def reason(name: str, content: Callable[[], bytes]) -> str | None:
    """Why the file of this name, relative to the workspace, is kept away; None where it is an ordinary one."""
    path = PurePosixPath(name)
    if path.name in _NAMES:
        return _NAMES[path.name]
    if path.suffix == ".pth":
        return "Python runs it at its start"
    if ".git" in path.parts[:-1] and ("hooks" in path.parts or path.name == "config"):
        return "git runs or obeys it"
    if path.parts[0].partition(".")[0] in _RUNNERS:
        return "it stands in for a module of the tests' own tools"
    if path.name in ("setup.cfg", "tox.ini") and _SECTION.search(content()):
        return "pytest obeys it"
    if path.name == "pyproject.toml" and _configures_pytest(content()):
        return "pytest obeys it"
    return None


def _configures_pytest(content: bytes) -> bool:
    try:
        tool = tomllib.loads(content.decode()).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return True  # who knows what reads it
    return isinstance(tool, dict) and "pytest" in tool
