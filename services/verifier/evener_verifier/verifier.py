"""A workspace is scored in a fresh sandbox by tests that its agent never saw; nothing it left stands in for a score.

The snapshot is at ``/workspace``, the tests are read-only at ``/tests``, ``/logs/verifier`` starts empty, there is no
network. A fault of ours is reported as such, never as a score of 0. Called by the service, once a command.
"""

import asyncio
import shutil
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.api import ScoreOrder
from evener.archive import tar_of_folder
from evener.blobs import Blobs
from evener.errors import EvenerError, InputError, TaskError
from evener.ids import parse_session_id
from evener.messages import RolloutScored
from evener.sandbox import HOME, WORKSPACE, ExecResult, Folder, Kind, Mount, Sandbox, SandboxSpec, choose, create
from evener.sandbox.initial import lay_out, limits_of
from evener.settings import SandboxKind
from evener.tasks import TaskToml, read_toml, unpack
from evener_verifier import evidence, relocate, reward

TESTS = "/tests"
LOGS = "/logs/verifier"
_TTL_S = 24 * 3600.0
"""How long a sandbox's folder may stand, for the reaper of another host."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is scored and by what: ``tests`` lie in the sandbox's folder on the host, both workspaces are tar files."""

    toml: TaskToml
    tests: Path
    pristine: bytes
    snapshot: bytes


@dataclass(frozen=True, slots=True)
class Ran:
    """What the tests did and wrote."""

    result: ExecResult
    json: bytes | None
    text: bytes | None


async def score(order: ScoreOrder, blobs: Blobs, sandboxes: Path, *, host: SandboxKind = "auto") -> RolloutScored:
    """Score one workspace. Never raises an EvenerError: the fault is the report's cause. ``host``: see `choose`."""
    session = parse_session_id(order.session_id)
    started = time.monotonic()
    scores: dict[str, float] = {}
    seen: dict[str, Any] = {}
    cause, detail = None, ""
    folder = Folder.make(sandboxes, f"score-{order.session_id}", ttl_s=_TTL_S)
    try:
        kind = await choose(order.sandbox, trusted=order.trusted, host=host)
        case = await asyncio.to_thread(fetch, order, blobs, folder)
        ran = await run_tests(case, kind, folder)
        seen = evidence.compose(ran.result, case.pristine, case.snapshot)
        if ran.result.timed_out and ran.json is None and ran.text is None:
            raise TaskError("reward_missing", f"tests/test.sh did not end within {case.toml.verifier.timeout_sec:g} s")
        scores = reward.parse(ran.json, ran.text)
    except EvenerError as error:
        cause, detail = error.cause, error.detail[:500]
    finally:
        await asyncio.to_thread(folder.remove)
    return RolloutScored(
        rollout_id=session.rollout_id,
        attempt=session.attempt,
        scores=scores,
        cause=cause,
        detail=detail,
        evidence=seen,
        seconds=time.monotonic() - started,
    )


def fetch(order: ScoreOrder, blobs: Blobs, folder: Folder) -> Case:
    """Fetch and unpack both sides of the task. Blocks. Raises InfraError, TaskError."""
    snapshot = blobs.get("snapshots", order.snapshot)
    grader, agent, pristine = (folder.path / name for name in ("grader", "agent", "pristine"))
    try:
        unpack(blobs.get("grader", order.grader_bundle), grader)
        unpack(blobs.get("agent", order.agent_bundle), agent)
        toml = read_toml(grader / "task.toml")
    except (OSError, tarfile.TarError, InputError) as error:
        raise TaskError("task_setup", f"{order.task_id}: {error}") from error
    lay_out(agent / "environment", pristine)
    return Case(toml, grader / "tests", tar_of_folder(pristine), snapshot)


async def run_tests(case: Case, kind: Kind, folder: Folder) -> Ran:
    """Run ``tests/test.sh`` over the snapshot. Raises InfraError."""
    spec = SandboxSpec(
        folder,
        mounts=(Mount(case.tests, TESTS),),
        writable=(WORKSPACE, HOME, "/tmp", LOGS),  # noqa: S108 - a path inside
        env=case.toml.verifier.env,
        limits=limits_of(case.toml),
    )
    sandbox = await create(kind, spec)
    try:
        await sandbox.upload(case.snapshot, WORKSPACE)
        return await _run(sandbox, case)
    finally:
        await sandbox.destroy()


async def _run(sandbox: Sandbox, case: Case) -> Ran:
    if sandbox.kind == "process":
        await asyncio.to_thread(relocate.rewrite, case.tests, sandbox.locate)
    shell = "bash" if shutil.which("bash") else "sh"
    result = await sandbox.exec([shell, sandbox.locate(f"{TESTS}/test.sh")], timeout=case.toml.verifier.timeout_sec)
    json = await sandbox.read(f"{LOGS}/reward.json", limit=reward.LIMIT)
    text = await sandbox.read(f"{LOGS}/reward.txt", limit=reward.LIMIT)
    return Ran(result, json, text)
