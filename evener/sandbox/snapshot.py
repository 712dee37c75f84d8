"""A snapshot holds what an agent made and nothing that could act on its reader: files, folders and links that stay inside.

Devices, sockets, FIFOs and links that leave the folder are left out and named, as is what is over the size limit, so
that the archive's reader need not trust its maker. The bytes depend on names, modes and contents alone. The folder's
maker must be dead: nothing changes while it is read. Called by the sandboxes.
"""

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evener.archive import link_stays_inside

MAX_BYTES = 256 << 20
MAX_ENTRIES = 50_000
MAX_DEPTH = 100
"""Folders within folders: what is deeper is left out."""
_MAX_PATH = 3800
"""A path of more than 4095 bytes cannot be opened (PATH_MAX); a name has at most 255."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tar file, and what is not in it as ``name: why``."""

    tar: bytes
    left_out: list[str]


def take(folder: Path, inside: str, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> Snapshot:
    """Archive ``folder``, which its maker knows as ``inside``, in the order of names."""
    left_out: list[str] = []
    buffer = io.BytesIO()
    entries = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, name in _walk(folder, ""):
            entries += 1
            if entries > max_entries:
                left_out.append(f"{name}: and all after it, over {max_entries} entries")
                break
            reason = _add(archive, path, name, inside, max_bytes - buffer.tell())
            if reason:
                left_out.append(f"{name}: {reason}")
    return Snapshot(buffer.getvalue(), left_out)


def _walk(folder: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    if not os.access(folder, os.R_OK | os.X_OK):
        folder.chmod(stat.S_IRWXU)
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path, name = Path(entry.path), prefix + entry.name
        yield path, name
        if entry.is_dir(follow_symlinks=False) and not _too_deep(path, name):
            yield from _walk(path, name + "/")


def _too_deep(path: Path, name: str) -> bool:
    return name.count("/") >= MAX_DEPTH or len(os.fsencode(path)) > _MAX_PATH


def _add(archive: tarfile.TarFile, path: Path, name: str, inside: str, room: int) -> str | None:
    """Add one entry; or say why not."""
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode = status.st_mode & 0o777
    match stat.S_IFMT(status.st_mode):
        case stat.S_IFDIR:
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
            if _too_deep(path, name):
                return "what it holds is too deep"
        case stat.S_IFLNK:
            target = _inner_target(name, str(path.readlink()), inside)
            if target is None:
                return "a link out of the folder"
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
        case stat.S_IFREG:
            if status.st_size > room:
                return f"{status.st_size} bytes are over the limit of a snapshot"
            info.size = status.st_size
            if not status.st_mode & stat.S_IRUSR:
                path.chmod(status.st_mode | stat.S_IRUSR)
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content:
                archive.addfile(info, content)
        case _:
            return "not a regular file"
    return None


def _inner_target(name: str, target: str, inside: str) -> str | None:
    """The link's target relative to the link, where it stays inside."""
    if target.startswith("/"):
        if not (target + "/").startswith(inside.rstrip("/") + "/"):
            return None
        target = posixpath.relpath(target, posixpath.join(inside, posixpath.dirname(name)))
    return target if link_stays_inside(name, target) else None
