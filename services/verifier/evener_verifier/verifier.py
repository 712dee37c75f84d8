"""A workspace is scored in a fresh sandbox by tests that its agent never saw; nothing it left stands in for a score.

A fault of ours is reported as such, never as a score of 0. The contract with the tests is docs/verifier.md. Called by the
service, once a command.
"""

import asyncio
import secrets
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.api import ScoreOrder
from evener.archive import tar_of_folder
from evener.blobs import Blobs
from evener.errors import EvenerError, InfraError, InputError, TaskError
from evener.ids import parse_session_id
from evener.messages import RolloutScored
from evener.sandbox import Folder, Kind, choose
from evener.sandbox.initial import lay_out
from evener.sandbox.threads import in_thread
from evener.settings import SandboxKind
from evener.tasks import TaskToml, read_toml, unpack
from evener_verifier import evidence, findings, verdict, workspace
from evener_verifier.contents import Contents
from evener_verifier.grader import TTL_S, Job, Ran, grade

_sound: set[tuple[str, str]] = set()
"""Bundles of tasks whose untouched workspace was found not to pass."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is scored and by what: ``tests`` lie in the sandbox's folder on the host."""

    toml: TaskToml
    tests: Path
    pristine: Contents
    snapshot: Contents


async def score(
    order: ScoreOrder, blobs: Blobs, sandboxes: Path, *, host: SandboxKind = "auto", root: Path | None = None
) -> RolloutScored:
    """Score one workspace. Never raises an EvenerError: the fault is the report's cause.

    ``host``: see `choose`. ``root``: what graders find at ``/opt/grader`` beside the system.
    """
    session = parse_session_id(order.session_id)
    started = time.monotonic()
    scores: dict[str, float] = {}
    seen: dict[str, Any] = {}
    cause, detail = None, ""
    # A name of its own: a command that a broker delivers again may be at work in another verifier of this host.
    folder = Folder.make(sandboxes, f"score-{order.session_id}-{secrets.token_hex(3)}", ttl_s=TTL_S)
    try:
        kind = await choose(order.sandbox, trusted=order.trusted, host=host)
        case = await in_thread(fetch, order, blobs, folder)
        seen |= {"tier": case.toml.verifier.tier, "sandbox": kind, "isolated": kind != "process"}
        if case.toml.verifier.baseline:
            await _check_baseline(order, case, kind, folder, root)
        scores = await _scores(case, kind, folder, root, seen)
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
    grader, agent, pristine = (folder.path / name for name in ("grader", "agent", "pristine"))
    snapshot = blobs.get("snapshots", order.snapshot)
    try:
        unpack(blobs.get("grader", order.grader_bundle), grader)
        unpack(blobs.get("agent", order.agent_bundle), agent)
        toml = read_toml(grader / "task.toml")
    except (OSError, tarfile.TarError, InputError) as error:
        raise TaskError("task_setup", f"{order.task_id}: {error}") from error
    lay_out(agent / "environment", pristine)
    try:
        return Case(toml, grader / "tests", Contents(tar_of_folder(pristine)), Contents(snapshot))
    except tarfile.TarError as error:
        raise InfraError("sandbox_failed", f"the snapshot cannot be read: {error}") from error


async def _scores(case: Case, kind: Kind, folder: Folder, root: Path | None, seen: dict[str, Any]) -> dict[str, float]:
    """Grade the snapshot, and note in ``seen`` what there was to see."""
    graded = await in_thread(workspace.prepare, case.pristine, case.snapshot, case.toml)
    ran = await grade(Job(case.toml, case.tests, graded.tar, kind, folder, root))
    found = [*graded.findings, *verdict.findings(ran, case.toml)]
    judged = verdict.judged(found)
    seen |= evidence.of_run(ran.result) | _details(ran)
    seen["findings"] = [each.as_json() for each in found[: findings.LIMIT]]
    seen["tampered"] = judged is not None
    seen["changes"] = evidence.changes(case.pristine, case.snapshot)
    seen["diff"] = await in_thread(evidence.diff, case.pristine, case.snapshot)
    if judged is None:
        return verdict.scores(ran, case.toml)
    seen["claimed"] = {name: evidence.end(text) for name, text in {"json": ran.json, "text": ran.text}.items() if text}
    return judged


def _details(ran: Ran) -> dict[str, Any]:
    """What only some gradings have."""
    details: dict[str, Any] = {}
    if ran.reports:
        details["reports"] = ran.reports
    if ran.candidate is not None:
        details["candidate"] = ran.candidate
    if ran.canaries is not None:
        details["tests"] = ran.canaries.tests()
    return details


async def _check_baseline(order: ScoreOrder, case: Case, kind: Kind, folder: Folder, root: Path | None) -> None:
    """Raises TaskError ``baseline_passes`` where the untouched workspace gets all there is. Once a process and task."""
    task = (order.grader_bundle, order.agent_bundle)
    if task in _sound:
        return
    own = Folder.make(folder.path.parent, f"{folder.path.name}-baseline", ttl_s=TTL_S)
    try:
        ran = await grade(Job(case.toml, case.tests, case.pristine.tar, kind, own, root))
    finally:
        await asyncio.to_thread(own.remove)
    if verdict.scores(ran, case.toml)["reward"] >= 1.0:
        raise TaskError("baseline_passes", f"{order.task_id}: the untouched workspace already gets reward 1")
    _sound.add(task)
