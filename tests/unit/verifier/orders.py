"""Orders to score a workspace by a test, as the ledger gives them."""

import io
import tarfile

from evener.api import ScoreOrder
from evener.ids import new_id, session_id


def tar(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def order(blobs, kind, test, workspace=None, toml=b"", pristine=None, trusted=True, tests=None):
    """An order to score ``workspace`` by ``test``."""
    initial = {f"environment/workspace/{name}": content for name, content in (pristine or {"given": b"1"}).items()}
    return ScoreOrder(
        session_id=session_id(new_id(), 1),
        task_id="t",
        snapshot=blobs.put("snapshots", tar(workspace if workspace is not None else {"done": b""})),
        agent_bundle=blobs.put("agent", tar({"task.toml": toml, "instruction.md": b"Do it.", **initial})),
        grader_bundle=blobs.put(
            "grader", tar({"task.toml": toml, "tests/test.sh": test, "tests/expected": b"secret", **(tests or {})})
        ),
        trusted=trusted,
        sandbox=kind,
    )
