"""A workspace is scored in a fresh sandbox by tests that its agent never saw; nothing it left stands in for a score.

A fault of ours is reported as such, never as a score of 0. Of a task of several steps each one's workspace is scored, and
tampering with one leaves nothing. The contract with the tests is docs/verifier.md. Called by the service, once a command.
"""

import asyncio
import secrets
import shutil
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evener.api import ScoreOrder
from evener.blobs import Blobs
from evener.errors import EvenerError, InfraError, InputError, TaskError
from evener.ids import parse_session_id
from evener.messages import RolloutScored
from evener.sandbox import WORKSPACE, Folder, Kind, choose
from evener.sandbox.initial import untouched
from evener.sandbox.threads import in_thread
from evener.settings import SandboxKind
from evener.snapshots import split
from evener.tasks import Step, Tier, read_toml, unpack
from evener_verifier import evidence, findings, pristine, steps, verdict, workspace
from evener_verifier.contents import Contents
from evener_verifier.grader import TTL_S, Job, Ran, grade
from evener_verifier.images import image_of

_sound: set[tuple[str, str]] = set()
"""Bundles of tasks whose untouched workspace was found not to pass."""


@dataclass(frozen=True, slots=True)
class Case:
    """One step, what is scored of it and by what: ``tests`` lie in the scoring's folder on the host.

    ``outside``: tar files of the folders outside of the workspace that hold artifacts, by their paths.
    """

    step: Step
    tests: Path
    pristine: Contents
    snapshot: Contents
    outside: dict[str, bytes]


async def score(
    order: ScoreOrder,
    blobs: Blobs,
    sandboxes: Path,
    *,
    host: SandboxKind = "auto",
    root: Path | None = None,
    images: Path | None = None,
) -> RolloutScored:
    """Score what one attempt left. Never raises an EvenerError: the fault is the report's cause.

    ``host``: see `choose`. ``root``: what graders find at ``/opt/grader`` beside the system. ``images``: where the images of
    graders lie, see `image_of`.
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
        cases = await _set_up(await in_thread(fetch, order, blobs, folder), kind, folder)
        seen |= {"tier": _tier(cases), "sandbox": kind, "isolated": kind != "process"}
        scoring = _Scoring(cases, kind, folder, root, images)
        if any(case.step.toml.verifier.baseline for case in cases):
            await scoring.check_baseline(order)
        scores = await scoring.run(seen)
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


def fetch(order: ScoreOrder, blobs: Blobs, folder: Folder) -> list[Case]:
    """Fetch and unpack both sides of the task; a case for each step. Blocks. Raises InfraError, TaskError."""
    grader, agent = folder.path / "grader", folder.path / "agent"
    blob = blobs.get("snapshots", order.snapshot)
    try:
        unpack(blobs.get("grader", order.grader_bundle), grader)
        unpack(blobs.get("agent", order.agent_bundle), agent)
        toml = read_toml(grader / "task.toml")
        bare = [Contents(tar) for tar in untouched(agent, toml, folder.path / "pristine")]
        tests = [_tests(step, grader, folder.path / "tests-of" / step.name) for step in toml.each_step()]
    except (OSError, tarfile.TarError, InputError) as error:
        raise TaskError("task_setup", f"{order.task_id}: {error}") from error
    try:
        left = split(toml, blob)
        snapshots = [Contents(each.workspace) for each in left]
    except tarfile.TarError as error:
        raise InfraError("sandbox_failed", f"the snapshot cannot be read: {error}") from error
    outside = [each.outside for each in left]
    return [Case(*each) for each in zip(toml.each_step(), tests, bare, snapshots, outside, strict=True)]


async def _set_up(cases: list[Case], kind: Kind, folder: Folder) -> list[Case]:
    """The same, where steps have set-up scripts with what these make. Raises InfraError, TaskError."""
    place = folder.path.with_name(f"{folder.path.name}-pristine")
    made = await pristine.set_up(folder.path / "agent", place, kind)
    return cases if made is None else [replace(case, pristine=Contents(tar)) for case, tar in zip(cases, made, strict=True)]


def _tests(step: Step, grader: Path, merged: Path) -> Path:
    """The tests of a step: its own over the task's."""
    if not step.name:
        return grader / "tests"
    merged.mkdir(parents=True)
    for tests in (grader / "tests", grader / step.place / "tests"):
        if tests.is_dir():
            shutil.copytree(tests, merged, dirs_exist_ok=True)
    return merged


def _tier(cases: list[Case]) -> Tier:
    """How far the score of a rollout can be trusted: as far as that of its weakest step."""
    tiers = {case.step.toml.verifier.tier for case in cases}
    return "in_process" if "in_process" in tiers else "out_of_process"


class _Scoring:
    """The gradings of one scoring: step by step, until one falls short of its ``min_reward``."""

    def __init__(self, cases: list[Case], kind: Kind, folder: Folder, root: Path | None, images: Path | None) -> None:
        self._cases = cases
        self._kind: Kind = kind
        self._folder = folder
        self._root = root
        self._images = images

    async def run(self, seen: dict[str, Any]) -> steps.Scores:
        """The scores; what was seen goes into ``seen``, in a part for each of several steps. Raises InfraError, TaskError."""
        scores: list[steps.Scores] = []
        parts: list[dict[str, Any]] = [seen]
        if self._cases[0].step.name:
            parts = [{"name": case.step.name, "tier": case.step.toml.verifier.tier} for case in self._cases]
            seen |= {"steps": parts, "tampered": False}
        for case, part in zip(self._cases, parts, strict=True):
            scores.append(await self._judge(case, part))
            if part is not seen:
                part["scores"] = scores[-1]
            if part["tampered"]:
                seen["tampered"] = True
                return scores[-1]
            if not steps.suffices(case.step, scores[-1]):
                break
        return self._rolled_up(scores)

    async def check_baseline(self, order: ScoreOrder) -> None:
        """Raises TaskError ``baseline_passes`` where the untouched workspace gets all there is. Once a process and task."""
        task = (order.grader_bundle, order.agent_bundle)
        if task in _sound:
            return
        scores: list[steps.Scores] = []
        for case in self._cases:
            graded = await in_thread(workspace.prepare, case.pristine, case.pristine, case.step.toml)
            ran = await self._grade(case, graded.tar, dict.fromkeys(case.outside, workspace.NOTHING))
            scores.append(_scores(ran, case.step))
            if not steps.suffices(case.step, scores[-1]):
                break
        if self._rolled_up(scores)["reward"] >= 1.0:
            raise TaskError("baseline_passes", f"{order.task_id}: the untouched workspace already gets reward 1")
        _sound.add(task)

    def _rolled_up(self, scores: list[steps.Scores]) -> steps.Scores:
        return steps.rolled_up(scores, self._cases[0].step.toml.multi_step_reward_strategy)

    async def _judge(self, case: Case, seen: dict[str, Any]) -> steps.Scores:
        """Grade one snapshot, and note in ``seen`` what there was to see."""
        graded = await in_thread(workspace.prepare, case.pristine, case.snapshot, case.step.toml)
        outside = {
            place: await in_thread(workspace.prepare_outside, place, tar, case.step.toml) for place, tar in case.outside.items()
        }
        ran = await self._grade(case, graded.tar, {place: each.tar for place, each in outside.items()})
        found = [finding for each in (graded, *outside.values()) for finding in each.findings]
        found += verdict.findings(ran, case.step.toml)
        judged = verdict.judged(found)
        seen |= evidence.of_run(ran.result) | _details(ran)
        seen["findings"] = [each.as_json() for each in found[: findings.LIMIT]]
        seen["tampered"] = judged is not None
        seen["changes"] = evidence.changes(case.pristine, case.snapshot)
        seen["diff"] = await in_thread(evidence.diff, case.pristine, case.snapshot)
        if outside:
            seen["artifacts"] = {place: evidence.names(each.tar) for place, each in outside.items()}
        if judged is None:
            return _scores(ran, case.step)
        seen["claimed"] = {name: evidence.end(text) for name, text in {"json": ran.json, "text": ran.text}.items() if text}
        return judged

    async def _grade(self, case: Case, tar: bytes, outside: dict[str, bytes]) -> Ran:
        """Run a step's tests over a workspace, in a folder that goes with their sandbox: ours holds what the next needs."""
        toml = case.step.toml
        own = Folder.make(self._folder.path.parent, f"{self._folder.path.name}-tests", ttl_s=TTL_S)
        try:
            image = await in_thread(image_of, toml, self._images, self._kind)
            tests, root = (case.tests, self._root) if image is None else (image / "tests", None)
            return await grade(Job(toml, tests, {WORKSPACE: tar, **outside}, self._kind, own, root, image))
        finally:
            await asyncio.to_thread(own.remove)


def _scores(ran: Ran, step: Step) -> steps.Scores:
    try:
        return verdict.scores(ran, step.toml)
    except TaskError as error:
        if step.name:
            raise TaskError(error.cause, f"step {step.name}: {error.detail}") from error
        raise


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
