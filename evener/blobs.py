"""A blob is named by its content, so that writing it twice is writing it once and reading it can be checked.

Layout: ``{url}/{area}/{first two hex digits}/{sha256}``. The areas part what services may read: a store with access rules
gives a runner ``agent`` alone, so that tests and solutions (``grader``) never reach an agent's host. Any fsspec URL works;
the embedded default is a folder. Calls block: from asyncio use `asyncio.to_thread`.
"""

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import fsspec

from evener.errors import InfraError
from evener.ids import new_id

Area = Literal["agent", "grader", "snapshots", "logs", "weights", "checkpoints"]
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest_of(data: bytes) -> str:
    """The name of a blob: ``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Blobs:
    """A content-addressed store at an fsspec URL or a folder."""

    def __init__(self, url: str | Path) -> None:
        filesystem, root = fsspec.core.url_to_fs(str(url))
        self._fs: Any = filesystem
        self._root = str(root).rstrip("/")

    def put(self, area: Area, data: bytes) -> str:
        """Store ``data`` and return its digest. A reader never sees a part of it: it is moved into place when whole.

        Raises InfraError ``blob_refused`` where the store is full or takes nothing from us.
        """
        digest = digest_of(data)
        path = self._path(area, digest)
        try:
            if not self._fs.exists(path):
                self._write(path, data)
        except OSError as error:
            raise InfraError("blob_refused", f"{digest} in {area} at {self._root}: {error}") from error
        return digest

    def _write(self, path: str, data: bytes) -> None:
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        part = f"{path}.{new_id()}.part"
        try:
            self._fs.pipe_file(part, data)
            self._fs.mv(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                self._fs.rm_file(part)  # half a blob would fill a full disk
            raise

    def get(self, area: Area, digest: str) -> bytes:
        """The blob named ``digest``. Raises InfraError: ``blob_missing`` where it is absent or damaged, ``blob_refused``."""
        try:
            data: bytes = self._fs.cat_file(self._path(area, digest))
        except FileNotFoundError as error:
            raise InfraError("blob_missing", f"{digest} in {area} at {self._root}") from error
        except OSError as error:
            raise InfraError("blob_refused", f"{digest} in {area} at {self._root}: {error}") from error
        if digest_of(data) != digest:
            raise InfraError("blob_missing", f"{digest} in {area} at {self._root} is damaged")
        return data

    def probe(self) -> None:
        """Write a blob, read it and remove it. Raises InfraError."""
        data = new_id().encode()
        digest = self.put("logs", data)
        try:
            self.get("logs", digest)
            self._fs.rm_file(self._path("logs", digest))
        except OSError as error:
            raise InfraError("blob_refused", f"{self._root}: {error}") from error

    def has(self, area: Area, digest: str) -> bool:
        """Whether the blob is there."""
        return bool(self._fs.exists(self._path(area, digest)))

    def _path(self, area: Area, digest: str) -> str:
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{digest!r} is not a blob digest (sha256:<64 hex digits>)")
        name = digest.removeprefix("sha256:")
        return f"{self._root}/{area}/{name[:2]}/{name}"
