"""Archives of a few files, as a task's bundles and snapshots are: everyone may read them."""

import io
import tarfile


def tar(files: dict[str, bytes]) -> bytes:
    """Files by their paths; no folder has an entry of its own."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
