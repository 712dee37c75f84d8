"""The writable folders of a sandbox on the host: what is put in before a command runs, and read out after.

A path inside maps to one folder below ``root``; what is read is never reached through a link that a command left. Used by
both kinds of sandbox.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evener.archive import extract
from evener.errors import InfraError
from evener.sandbox import snapshot
from evener.sandbox.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Writable:
    """Folders ``paths`` inside, kept below ``root``, owned by user ``owner``."""

    root: Path
    paths: tuple[str, ...]
    owner: int

    def make(self) -> None:
        """Make them, empty."""
        for path in self.paths:
            folder = self.host(path)
            folder.mkdir(parents=True, mode=0o755)
            self._own(folder)

    def host(self, path: str) -> Path:
        """Where the writable folder ``path`` is on the host."""
        if path not in self.paths:
            raise ValueError(f"{path!r} is not a writable folder of this sandbox ({', '.join(self.paths)})")
        return self.root / path.strip("/").replace("-", "--").replace("/", "-")

    def unpack(self, tar: bytes, path: str, over: bool) -> None:
        """Unpack a tar file made by us or by `snapshot`; ``over``: see `extract`."""
        folder = self.host(path)
        try:
            extract(tar, folder, over=over)
        except (tarfile.TarError, OSError) as error:
            raise InfraError("sandbox_failed", f"unpacking into {path}: {error}") from error
        if self.owner != os.geteuid():
            for entry in _below(folder):
                self._own(entry)

    def read(self, path: str, limit: int) -> bytes | None:
        """The first ``limit`` bytes of a regular file directly below a writable folder."""
        file = PurePosixPath(path)
        try:
            descriptor = os.open(self.host(str(file.parent)) / file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        with os.fdopen(descriptor, "rb") as content:
            return content.read(limit)

    def modes(self, path: str) -> dict[str, int]:
        """``st_mode`` by name of what lies directly below a writable folder, and of itself as ``"."``."""
        folder = self.host(path)
        modes = {".": folder.stat().st_mode}
        if os.access(folder, os.R_OK | os.X_OK):
            modes |= {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in os.scandir(folder)}
        return modes

    def snapshot(self, path: str, max_bytes: int) -> Snapshot:
        """Archive one of them."""
        try:
            return snapshot.take(self.host(path), path, max_bytes=max_bytes)
        except OSError as error:
            raise InfraError("snapshot_failed", f"{path}: {error}") from error

    def _own(self, path: Path) -> None:
        if self.owner != os.geteuid():
            os.chown(path, self.owner, self.owner, follow_symlinks=False)


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent) / name
