"""A task's own solution leaves a snapshot by the way that a rollout takes, and so does an agent that does nothing.

The sandbox, the archive of its workspace and the verifier are those of a rollout; only the agent is another: ``solution/`` at
``/solution``, whose ``solve.sh`` runs in the pristine workspace, or that of each step in what the one before left. What comes
out is the score of each. Called by `evener tasks check`.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from evener.api import ScoreOrder
from evener.archive import tar_of_folder
from evener.blobs import Blobs
from evener.errors import InfraError, TaskError
from evener.ids import new_id, parse_session_id, session_id
from evener.messages import RolloutScored
from evener.removal import remove
from evener.sandbox import WORKSPACE, ExecResult, Folder, Mount, Sandbox, SandboxSpec, choose, create
from evener.sandbox.initial import Added, added_by, lay_out, limits_of, writable_of
from evener.sandbox.threads import in_thread
from evener.settings import SandboxKind
from evener.snapshots import Workspaces
from evener.tasks import Task, TaskToml, agent_bundle, grader_bundle, unpack
from evener_verifier import relocate
from evener_verifier.verifier import score

SOLUTION = "/solution"
SOLVE = "solve.sh"
SOLVE_S = 600.0
"""How long a solution may take where the task does not limit its agent."""
_TTL_S = 24 * 3600.0
"""How long a sandbox's folder may stand, for the reaper of another host."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where tasks are tried: a store in place of a stack's, a folder for sandboxes, and what this host's verifiers are told."""

    blobs: Blobs
    sandboxes: Path
    host: SandboxKind
    root: Path | None
    images: Path | None


class Checked(NamedTuple):
    """The score of both workspaces, and how the solution ended: the first step of it that failed, or the last (None: it was not
    started).
    """

    solution: RolloutScored
    untouched: RolloutScored
    solved: ExecResult | None


async def check(
    task: Task,
    blobs: Blobs,
    sandboxes: Path,
    *,
    host: SandboxKind = "auto",
    root: Path | None = None,
    images: Path | None = None,
) -> Checked:
    """Score the workspace that the solution leaves, and the untouched one. The task counts as the user's own.

    ``host``, ``root``, ``images``: see `verifier.score`. Faults of the task and of ours are causes in the reports. Raises
    InputError where one of its files cannot be bundled, or where the sandbox that ``host`` names does not work here.
    """
    bench = _Bench(blobs, sandboxes, host, root, images)
    order = await asyncio.to_thread(_order, task, bench.blobs)
    solution, solved = await _score(task, bench, order, solve=True)
    untouched, _ = await _score(task, bench, order, solve=False)
    return Checked(solution, untouched, solved)


def _order(task: Task, blobs: Blobs) -> ScoreOrder:
    """What a stack would ask of its verifier, but for session and snapshot."""
    return ScoreOrder(
        session_id="",
        task_id=task.id,
        snapshot="",
        agent_bundle=blobs.put("agent", agent_bundle(task)),
        grader_bundle=blobs.put("grader", grader_bundle(task)),
        trusted=True,
        sandbox="auto",
    )


async def _score(task: Task, bench: _Bench, order: ScoreOrder, *, solve: bool) -> tuple[RolloutScored, ExecResult | None]:
    session = session_id(new_id(), 1)
    try:
        snapshot, solved = await _leave(task, bench, order, session, solve=solve)
    except (TaskError, InfraError) as error:
        rollout_id, attempt = parse_session_id(session)
        return RolloutScored(rollout_id=rollout_id, attempt=attempt, cause=error.cause, detail=error.detail), None
    order = replace(order, session_id=session, snapshot=snapshot)
    scored = await score(order, bench.blobs, bench.sandboxes, host=bench.host, root=bench.root, images=bench.images)
    return scored, solved


async def _leave(task: Task, bench: _Bench, order: ScoreOrder, session: str, *, solve: bool) -> tuple[str, ExecResult | None]:
    """Stand in for a rollout; the digest of the snapshot, and how the solution ended. Raises TaskError, InfraError."""
    kind = await choose(order.sandbox, trusted=order.trusted, host=bench.host)
    folder = Folder.make(bench.sandboxes, f"solve-{session}", ttl_s=_TTL_S)
    try:
        workspace, additions = await in_thread(_agent_side, task.toml, bench.blobs, order, folder.path)
        solutions = await in_thread(_solutions, task.toml, bench.blobs, order, folder.path) if solve else []
        place = folder.path / "solution"
        mounts = (Mount(place, SOLUTION),) if solve else ()
        spec = SandboxSpec(folder, mounts=mounts, writable=writable_of(task.toml, kind), limits=limits_of(task.toml))
        sandbox = await create(kind, spec)
        try:
            await sandbox.upload(workspace, WORKSPACE)
            workspaces = Workspaces(sandbox, task.toml, additions)
            solved: list[ExecResult] = []
            for step, solution in zip(task.toml.each_step(), solutions, strict=False):
                await workspaces.begin()
                await in_thread(_place, solution, place)
                solved.append(await _solve(sandbox, place, step.toml.agent.timeout_sec or SOLVE_S))
                await workspaces.end()
            taken = await workspaces.finish()
            if workspaces.failures:
                raise TaskError("task_setup", workspaces.failures[0])
        finally:
            await sandbox.destroy()
    finally:
        await asyncio.to_thread(folder.remove)
    failed = (each for each in solved if each.exit_code != 0 or each.timed_out)
    return await asyncio.to_thread(bench.blobs.put, "snapshots", taken.tar), next(failed, solved[-1] if solved else None)


def _agent_side(toml: TaskToml, blobs: Blobs, order: ScoreOrder, folder: Path) -> tuple[bytes, list[Added | None]]:
    """The workspace that an agent finds, and what each step adds, as tar files. Blocks. Raises TaskError ``task_setup``."""
    unpack(blobs.get("agent", order.agent_bundle), folder / "task")
    lay_out(folder / "task" / "environment", folder / "initial")
    return tar_of_folder(folder / "initial"), [added_by(step, folder / "task") for step in toml.each_step()]


def _solutions(toml: TaskToml, blobs: Blobs, order: ScoreOrder, folder: Path) -> list[Path]:
    """The folder of each step's solution. Blocks. Raises TaskError ``task_setup``."""
    unpack(blobs.get("grader", order.grader_bundle), folder / "grader")
    places = [step.place / "solution" for step in toml.each_step()]
    for place in places:
        if not (folder / "grader" / place / SOLVE).is_file():
            raise TaskError("task_setup", f"{place / SOLVE} is missing")
    (folder / "solution").mkdir()
    return [folder / "grader" / place for place in places]


def _place(solution: Path, place: Path) -> None:
    """Make ``place``, which a sandbox has mounted, hold this solution and no other. Blocks."""
    for left in place.iterdir():
        remove(left) if left.is_dir() else left.unlink()
    shutil.copytree(solution, place, dirs_exist_ok=True)


async def _solve(sandbox: Sandbox, solution: Path, timeout: float) -> ExecResult:
    if sandbox.kind == "process":
        await in_thread(relocate.rewrite, solution, sandbox.locate)
    shell = "bash" if shutil.which("bash") else "sh"
    return await sandbox.exec([shell, sandbox.locate(f"{SOLUTION}/{SOLVE}")], timeout=timeout)
