"""Artifacts outside of the workspace lie in folders of their own, which an agent may write to and its grader finds again.

Such a folder is archived beside the workspace. Where a sandbox has files of its own (the system, its user's home, /tmp) there
can be none. Called by `tasks`, and by the verifier, which takes over what counts.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from evener.sandbox.port import WORKSPACE

CONVENTION = "/logs/artifacts"
"""Where the Harbor format collects without being asked to."""
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "root", "run", "sbin", "sys", "usr")
_SANDBOX = ("home", "logs", "solution", "tests", "tmp")


def place_of(source: str) -> str:
    """The folder that an artifact's file or folder lies in; a relative source is one of the workspace.

    Raises ValueError where no sandbox can have it.
    """
    path = PurePosixPath(WORKSPACE, source)
    if ".." in path.parts:
        raise ValueError(f"{source}: '..' leads elsewhere")
    for place in (WORKSPACE, CONVENTION):
        if path.is_relative_to(place):
            return place
    if len(path.parts) < 2 or path.parts[1] in (*_SYSTEM, *_SANDBOX):
        raise ValueError(f"{source}: agents cannot leave artifacts there; let them write to {WORKSPACE} or {CONVENTION}")
    if len(path.parts) > 2:
        return str(path.parent)
    if path.suffix:
        raise ValueError(f"{source}: a file needs a folder around it that an agent may write to")
    return str(path)


def places_of(sources: Iterable[str]) -> tuple[str, ...]:
    """The folders outside of the workspace that hold all of ``sources``, none of them below another."""
    places = sorted({place_of(source) for source in sources} - {WORKSPACE})
    return tuple(place for place in places if not any(str(above) in places for above in PurePosixPath(place).parents))


def collects(source: str, exclude: Sequence[str], path: PurePosixPath) -> bool:
    """Whether the file or folder ``path`` belongs to an artifact. ``exclude`` are patterns as of ``tar --exclude``."""
    top = PurePosixPath(WORKSPACE, source)
    if not path.is_relative_to(top):
        return False
    parts = path.relative_to(top).parts
    ends = [(start, end) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1)]
    return not any(fnmatchcase("/".join(parts[start:end]), _bare(pattern)) for start, end in ends for pattern in exclude)


def _bare(pattern: str) -> str:
    return pattern.removeprefix("./").rstrip("/")
