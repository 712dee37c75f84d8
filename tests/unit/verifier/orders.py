"""Orders to score a workspace by a test, as the ledger gives them."""

import tomllib

from pydantic import ValidationError

from evener.api import ScoreOrder
from evener.ids import new_id, session_id
from evener.snapshots import Left, join
from evener.tasks import TaskToml
from tests.tars import tar


def left(toml, workspace, outside):
    """The blob of what was left; that of a malformed task does not matter."""
    try:
        table = TaskToml.model_validate(tomllib.loads(toml.decode()))
    except ValidationError:
        return tar(workspace)
    return join(table, [Left(tar(workspace), {place: tar((outside or {}).get(place, {})) for place in table.places})])


def order(blobs, kind, test, workspace=None, toml=b"", pristine=None, trusted=True, tests=None, outside=None):
    """An order to score ``workspace`` by ``test``; ``outside`` has files by their folders outside of it."""
    initial = {f"environment/workspace/{name}": content for name, content in (pristine or {"given": b"1"}).items()}
    return ScoreOrder(
        session_id=session_id(new_id(), 1),
        task_id="t",
        snapshot=blobs.put("snapshots", left(toml, workspace if workspace is not None else {"done": b""}, outside)),
        agent_bundle=blobs.put("agent", tar({"task.toml": toml, "instruction.md": b"Do it.", **initial})),
        grader_bundle=blobs.put(
            "grader", tar({"task.toml": toml, "tests/test.sh": test, "tests/expected": b"secret", **(tests or {})})
        ),
        trusted=trusted,
        sandbox=kind,
    )
