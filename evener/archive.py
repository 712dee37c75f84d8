"""A tar file is unpacked into a folder and nowhere else, whoever made it; and tar files that we make for a sandbox.

`extract` knows files, folders, links that stay inside and hard links to what it has unpacked; all else is refused, and what
unpacks to more than it weighs: compressed archives, sparse files, more than `MAX_BYTES`.
(tarfile's own filters came with Python 3.11.4; Debian 12 has 3.11.2.) Called by whatever unpacks a bundle or a snapshot.
"""

import io
import os
import posixpath
import shutil
import stat
import tarfile
from pathlib import Path

from evener.removal import remove

MAX_BYTES = 512 << 20
MAX_ENTRIES = 100_000


class UnsafeArchive(tarfile.TarError):
    """A tar file wants to leave its folder, or holds what is no file, folder or link."""


def extract(tar: bytes, folder: Path, *, over: bool = False) -> None:
    """Unpack ``tar`` into ``folder``, which nobody else writes to. Raises tarfile.TarError, OSError.

    What is there already is refused, or with ``over`` removed where it stands in the way: links and other files, and a folder
    where a file is to be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    room = MAX_BYTES
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
        for number, member in enumerate(archive):
            if number >= MAX_ENTRIES:
                raise UnsafeArchive(f"over {MAX_ENTRIES} entries")
            name = _inner(member.name)
            if over:
                _make_way(folder, name, for_folder=member.isdir())
            room -= _weight(member, folder)
            if room < 0:
                raise UnsafeArchive(f"{member.name!r} and what comes before it are over {MAX_BYTES >> 20} MiB")
            _extract_member(archive, member, folder, name)


def _make_way(folder: Path, name: str, *, for_folder: bool) -> None:
    """Remove what would keep a member from being unpacked to ``name``; folders on its way are opened to their owner."""
    path = folder / name
    for place in (*(folder / parent for parent in reversed(Path(name).parents)), path):
        wanted = for_folder or place != path
        if place.is_symlink() or not place.is_dir():
            place.unlink(missing_ok=True)
        elif wanted:
            place.chmod(place.stat().st_mode | stat.S_IRWXU)
        else:
            remove(place)


def _weight(member: tarfile.TarInfo, folder: Path) -> int:
    """The bytes that a member unpacks to."""
    if member.issparse():
        raise UnsafeArchive(f"{member.name!r} is sparse")
    if member.islnk():
        source = folder / _inner(member.linkname)
        return source.lstat().st_size if source.is_file() else 0
    return member.size


def _extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, name: str) -> None:
    path = folder / name
    for parent in path.relative_to(folder).parents:
        if (folder / parent).is_symlink():
            raise UnsafeArchive(f"{member.name!r} lies beyond a link")
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        path.mkdir(exist_ok=True)
        path.chmod(0o700 | member.mode & 0o755)
    elif member.issym():
        if not link_stays_inside(name, member.linkname):
            raise UnsafeArchive(f"{member.name!r} is a link out of the folder")
        path.symlink_to(member.linkname)
    elif member.islnk():
        source = folder / _inner(member.linkname)
        if source.is_symlink():
            raise UnsafeArchive(f"{member.name!r} is a hard link to a link")
        shutil.copyfile(source, path)
        path.chmod(source.stat().st_mode & 0o777)
    elif member.isreg():
        content = archive.extractfile(member)
        assert content is not None, "a regular member has content"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(0o600 | member.mode & 0o755)
    else:
        raise UnsafeArchive(f"{member.name!r} is no file, folder or link")


def link_stays_inside(name: str, target: str) -> bool:
    """Whether a link at ``name``, which lies beyond no other link, stays in the folder whatever else is in it.

    A step up may only come first: after the name of another link it would start from where that one leads.
    """
    words = [word for word in target.split("/") if word not in ("", ".")]
    up = next((number for number, word in enumerate(words) if word != ".."), len(words))
    depth = posixpath.normpath(name).count("/")
    return not target.startswith("/") and up <= depth and ".." not in words[up:]


def _inner(name: str) -> str:
    """A relative path that stays inside, normalised; "." is the folder itself."""
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path == "..":
        raise UnsafeArchive(f"{name!r} is outside of the folder")
    return path


def tar_of_folder(folder: Path) -> bytes:
    """The contents of a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def tar_of_files(files: dict[str, bytes]) -> bytes:
    """Files by their paths, for their owner alone (they may hold a key); their folders are made."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for parent in dict.fromkeys(parent for name in files for parent in reversed(Path(name).parents)):
            if parent != Path():
                folder = tarfile.TarInfo(str(parent))
                folder.type, folder.mode = tarfile.DIRTYPE, 0o700
                archive.addfile(folder)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
