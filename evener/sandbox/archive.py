"""Tar files that go into a sandbox: of a folder of ours, and of files that we write. Called by runner and verifier."""

import io
import tarfile
from pathlib import Path


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
