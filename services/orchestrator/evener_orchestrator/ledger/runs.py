"""A run file's name means one run: submitting it again goes on with that run, and never silently with other content.

Called by the API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from evener.errors import InputError
from evener.ids import new_id
from evener.runfile import RunFile
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.endings import end_run
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.locks import await_turn, lock_run
from evener_orchestrator.ledger.models import PolicyVersion, Run, RunTask, Task
from evener_orchestrator.ledger.reissue import reissue
from evener_orchestrator.states import RunState, VersionState, moved

ADOPTED = ("rollouts.concurrent", "rollouts.sandbox", "train.steps", "eval.every")
"""Keys that may differ when a run is resumed: they pace it and leave every group comparable."""

PATHS = ("tasks", "eval.tasks", "policy")
"""Keys that only say where content lay; the content is compared by digest."""

ONE_AT_A_TIME = "run"
"""A turn (`locks.await_turn`) of whoever lets a run run."""

UNKNOWN = "unknown"
"""Prompt mode of a run that asks for ``token_in``, until `resolve_prompts`."""

UNFINISHED = (RunState.RUNNING, RunState.PAUSED)


@dataclass(frozen=True, slots=True)
class Submission:
    """What a user submits: the run file, and the digests of what was uploaded before."""

    file: RunFile
    tasks: Sequence[str]
    eval_tasks: Sequence[str]
    weights: str
    trusted: bool
    new: bool


async def submit(tx: Transaction, submission: Submission) -> tuple[Run, bool]:
    """The run of this name and whether it existed.

    Raises Conflict where the content differs, InputError where it is bad, or ``stack_in_use`` while another run is running.
    """
    tasks = await _tasks(tx, submission)
    await await_turn(tx, ONE_AT_A_TIME)
    earlier = (
        await tx.session.scalars(
            select(Run).where(Run.name == submission.file.name).order_by(Run.id.desc()).limit(1).with_for_update()
        )
    ).one_or_none()
    if earlier is not None and not submission.new:
        await _check_same(tx, earlier, submission, tasks)
        await _resume(tx, earlier, submission.file)
        return earlier, True
    if earlier is not None and earlier.state in UNFINISHED:
        await end_run(tx, earlier, RunState.CANCELLED, "another run of the same name was started (--new)")
    return await _create(tx, submission, tasks), False


async def cancel(tx: Transaction, run_id: str) -> Run:
    """Cancel a run. Raises Conflict where it is over."""
    run = await lock_run(tx, run_id)
    if run.state is not RunState.CANCELLED:
        _check_unfinished(run)
        await end_run(tx, run, RunState.CANCELLED, "cancelled by the user")
    return run


async def pause(tx: Transaction, run_id: str) -> Run:
    """Start nothing more; what runs is told by its heartbeat. Raises Conflict where the run is over."""
    run = await lock_run(tx, run_id)
    _check_unfinished(run)
    if run.state is RunState.RUNNING:
        run.state = moved(run.state, RunState.PAUSED)
        tx.note("run", run_id=run.id, state=run.state)
    return run


async def resume(tx: Transaction, run_id: str) -> Run:
    """Go on with a paused run; commands that were refused meanwhile are issued again. Raises Conflict where it is over.

    Raises InputError ``stack_in_use`` while another run is running.
    """
    await await_turn(tx, ONE_AT_A_TIME)
    run = await lock_run(tx, run_id)
    _check_unfinished(run)
    if run.state is RunState.PAUSED:
        await _check_free(tx)
        run.state = moved(run.state, RunState.RUNNING)
        tx.note("run", run_id=run.id, state=run.state)
        await tx.session.flush()
        await reissue(tx, before=tx.now, run_id=run.id)
    return run


async def resolve_prompts(tx: Transaction, run_id: str, problem: str | None) -> None:
    """Decide a run's prompt mode, once. ``problem``: why the engines cannot be given prompts as ids, None where they can."""
    run = await lock_run(tx, run_id)
    if run.prompt_mode == UNKNOWN:
        run.prompt_mode = "token_in" if problem is None else "render"
        run.prompt_reason = problem or ""
        tx.note("run", run_id=run.id, state=run.state, prompt=run.prompt_mode, prompt_reason=run.prompt_reason)


def _check_unfinished(run: Run) -> None:
    if run.state not in UNFINISHED:
        raise Conflict(f"run {run.id} is {run.state}")


async def _check_free(tx: Transaction) -> None:
    """A stack's engines serve one policy: rollouts of a second run would be sampled from the first one's weights."""
    other = (await tx.session.scalars(select(Run).where(Run.state == RunState.RUNNING).limit(1))).one_or_none()
    if other is not None:
        raise InputError("stack_in_use", f"run {other.name} ({other.id}) is running")


async def _tasks(tx: Transaction, submission: Submission) -> dict[str, list[str]]:
    """Digests by purpose, each once. Raises InputError for those that were never uploaded."""
    given = {"eval": list(dict.fromkeys(submission.tasks))}
    if submission.file.train is not None:
        given = {"train": given["eval"], "eval": list(dict.fromkeys(submission.eval_tasks))}
    wanted = {digest for digests in given.values() for digest in digests}
    known = set(await tx.session.scalars(select(Task.digest).where(Task.digest.in_(wanted))))
    if missing := sorted(wanted - known):
        raise InputError("request_invalid", f"tasks: {missing[0]} was not uploaded (PUT /v1/tasks/{{digest}} first)")
    if not submission.tasks:
        raise InputError("request_invalid", "tasks: is empty")
    if submission.file.train and (submission.file.eval is None) == bool(submission.eval_tasks):
        raise InputError("request_invalid", "eval_tasks: must be given where the run file has [eval], and only there")
    return given


async def _create(tx: Transaction, submission: Submission, tasks: dict[str, list[str]]) -> Run:
    name = submission.file.name
    before = await tx.session.scalar(select(func.count()).where(Run.name == name)) or 0
    policy = name if not before else f"{name}-{before + 1}"
    await _check_free(tx)
    if await tx.session.scalar(select(Run.id).where(Run.policy == policy)) is not None:
        raise Conflict(f"another run trains a policy named {policy!r}; choose another name")
    run = Run(
        id=new_id(),
        name=name,
        kind=submission.file.kind,
        state=RunState.RUNNING,
        policy=policy,
        file=submission.file.model_dump(mode="json"),
        trusted=submission.trusted,
        prompt_mode=UNKNOWN if submission.file.rollouts.prompt == "token_in" else "render",
        created_at=tx.now,
    )
    tx.session.add(run)
    await tx.session.flush()
    tx.session.add(
        PolicyVersion(
            policy=policy,
            version=1,
            state=VersionState.PUBLISHED,
            epoch=0,
            step=0,
            weights=submission.weights,
            allotted_at=tx.now,
            published_at=tx.now,
        )
    )
    tx.session.add_all(
        RunTask(run_id=run.id, purpose=purpose, position=position, task_digest=digest)
        for purpose, digests in tasks.items()
        for position, digest in enumerate(digests)
    )
    tx.note("run", run_id=run.id, state=run.state)
    return run


async def _resume(tx: Transaction, run: Run, file: RunFile) -> None:
    if run.state not in UNFINISHED:
        return
    run.file = file.model_dump(mode="json")
    await resume(tx, run.id)


async def _check_same(tx: Transaction, run: Run, submission: Submission, tasks: dict[str, list[str]]) -> None:
    """Raises Conflict that names what differs between a stored run and a submission of its name."""
    stored: dict[str, list[str]] = {}
    rows = await tx.session.scalars(select(RunTask).where(RunTask.run_id == run.id).order_by(RunTask.position))
    for row in rows:
        stored.setdefault(row.purpose, []).append(row.task_digest)
    differ = [
        f"tasks ({purpose}: {len(set(stored.get(purpose, [])) ^ set(tasks.get(purpose, [])))} differ)"
        for purpose in ("train", "eval")
        if set(stored.get(purpose, [])) != set(tasks.get(purpose, []))
    ]
    start = await tx.session.get_one(PolicyVersion, (run.policy, 1))
    if start.weights != submission.weights:
        differ.append("policy (other weights)")
    old = _flat(RunFile.model_validate(run.file).model_dump(mode="json"))
    new = _flat(submission.file.model_dump(mode="json"))
    differ += [
        f"{key} ({old.get(key)} -> {new.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if key not in (*ADOPTED, *PATHS) and old.get(key) != new.get(key)
    ]
    if differ:
        raise Conflict(
            f"run {run.name!r} exists with other content: {', '.join(differ)}; give --new to start another run, or another name"
        )


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
