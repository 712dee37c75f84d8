"""A policy and a checkpoint are folders here and tar archives in the blob store; the same folder gives the same bytes.

Equal bytes have one digest, so that publishing twice stores once. `Position` is the learner's own file in a checkpoint: what
step and version it holds, and which versions belong to its line of weights. Called by `evener_learner.campaign`.
"""

import io
import tarfile
from pathlib import Path

import msgspec

from evener.archive import extract
from evener.errors import InfraError

POSITION = "learner.json"
LINEAGE = 1024
"""Versions that a checkpoint remembers; more than any `max_staleness`."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where training stands: optimizer steps done, the version they made, and the newest versions of this line."""

    step: int
    version: int
    published: list[int]


def pack_folder(folder: Path) -> bytes:
    """The files of ``folder`` as a tar archive with names alone: no times, owners or modes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(file.relative_to(folder).as_posix())
            entry.size = file.stat().st_size
            with file.open("rb") as content:
                archive.addfile(entry, content)
    return buffer.getvalue()


def unpack_folder(data: bytes, folder: Path) -> Path:
    """Write the archive's regular files below ``folder`` and return the folder that holds them.

    An archive whose files all lie in one top folder is entered. Raises InfraError ``blob_missing`` for what is no archive.
    """
    try:
        extract(data, folder)
    except tarfile.TarError as error:
        raise InfraError("blob_missing", f"an archive for {folder} cannot be read: {error}") from error
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


def write_position(checkpoint: Path, position: Position) -> None:
    """Put ``position`` into a checkpoint folder."""
    (checkpoint / POSITION).write_bytes(msgspec.json.encode(position))


def read_position(checkpoint: Path) -> Position:
    """The position of a checkpoint folder. Raises InfraError ``blob_missing`` where it is absent or damaged."""
    try:
        return msgspec.json.decode((checkpoint / POSITION).read_bytes(), type=Position)
    except (OSError, msgspec.DecodeError) as error:
        raise InfraError("blob_missing", f"the checkpoint in {checkpoint} holds no {POSITION}: {error}") from error
