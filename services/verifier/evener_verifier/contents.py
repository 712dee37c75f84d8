"""The files of a workspace by name, read out of its tar file and never unpacked.

Called by `workspace` and `evidence`; the tar files are `sandbox.snapshot`'s and `archive.tar_of_folder`'s.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """A file (``digest`` of its content), a link (``-> target``) or a folder (""); modes and times are not compared."""

    digest: str
    member: tarfile.TarInfo = field(compare=False)

    @property
    def is_folder(self) -> bool:
        """Whether it is one."""
        return self.member.isdir()

    @property
    def is_file(self) -> bool:
        """Whether it is one."""
        return self.member.isreg()


class Contents:
    """A tar file and its entries."""

    def __init__(self, tar: bytes) -> None:
        self.tar = tar
        self._archive = tarfile.open(fileobj=io.BytesIO(tar), mode="r:")  # noqa: SIM115 - it lives as long as the bytes
        self.entries = {member.name: Entry(self._digest(member), member) for member in self._archive}

    def read(self, name: str) -> bytes:
        """The content of a file."""
        content = self._archive.extractfile(self.entries[name].member)
        return b"" if content is None else content.read()

    def files(self) -> Iterator[tuple[str, Entry]]:
        """What is no folder."""
        return ((name, entry) for name, entry in self.entries.items() if not entry.is_folder)

    def _digest(self, member: tarfile.TarInfo) -> str:
        if member.issym():
            return f"-> {member.linkname}"
        content = self._archive.extractfile(member) if member.isreg() else None
        return "" if content is None else hashlib.sha256(content.read()).hexdigest()
