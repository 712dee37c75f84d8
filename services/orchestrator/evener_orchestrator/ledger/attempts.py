"""What an older attempt or a lapsed lease says changes nothing, and every attempt ends once.

A claim gives a random lease whose hash is stored; every later word carries it. An infrastructure fault gets a new attempt,
a bounded number of times with back-off; what the agent did is archived and goes to a verifier. Called by the API (claim,
heartbeat) and the consumer (finish); `expire` runs every few seconds.
"""

import hashlib
import hmac
import secrets
from datetime import UTC, datetime, timedelta

from msgspec.structs import asdict
from sqlalchemy import bindparam, column, func, select, text

from evener.api import Budget, HarnessRef, Heartbeat, RolloutLease, Sampling
from evener.errors import Outcome
from evener.ids import session_id
from evener.messages import RolloutFinished, RunRollout, ScoreWorkspace
from evener.runfile import RunFile
from evener_orchestrator.archive import Archive
from evener_orchestrator.ledger import versions
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.endings import dispose
from evener_orchestrator.ledger.engine import Held, Transaction
from evener_orchestrator.ledger.groups import close_complete
from evener_orchestrator.ledger.locks import hold
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run
from evener_orchestrator.ledger.traces import store
from evener_orchestrator.ledger.types import Timestamp, Word, storable
from evener_orchestrator.states import GroupState, RolloutState, RunState, moved

ATTEMPTS = 3
"""Attempts of ours that may fail before the rollout does; a fault that strikes three times will strike again."""

BACKOFF_S = 1.0
"""Pause before the second attempt; doubled before each further one."""

UNCOUNTED = "service_stopped"
"""A user who stops the stack wastes an attempt, but not one of the `ATTEMPTS`."""

EVAL_PRIORITY = 5
GRADED = (Outcome.FINISHED, Outcome.BUDGET, Outcome.AGENT_ERROR)


def queue(tx: Transaction, rollout: Rollout, purpose: str) -> None:
    """Give a planned rollout its next attempt and tell the runners."""
    rollout.state = moved(rollout.state, RolloutState.QUEUED)
    rollout.attempt += 1
    rollout.issued_at = tx.now
    rollout.not_before = None
    attempt = Attempt(
        id=session_id(rollout.id, rollout.attempt), rollout_id=rollout.id, number=rollout.attempt, created_at=tx.now
    )
    tx.session.add(attempt)
    tx.send(
        RunRollout(run_id=rollout.run_id, rollout_id=rollout.id, attempt=rollout.attempt),
        priority=EVAL_PRIORITY if purpose == "eval" else 0,
    )


async def claim(tx: Transaction, session: str, *, runner: str, lease_s: float) -> RolloutLease:
    """Lease a queued attempt to a runner. Raises Conflict where it is held or over, or its run is not running."""
    held = await hold(tx, session)
    _current(held)
    if held.run.state is not RunState.RUNNING:
        raise Conflict(f"the run is {held.run.state}")
    if held.rollout.state is not RolloutState.QUEUED:
        raise Conflict(f"attempt {session} is {held.rollout.state}")
    lease = secrets.token_urlsafe(24)
    held.rollout.state = moved(held.rollout.state, RolloutState.RUNNING)
    held.attempt.runner = runner
    held.attempt.lease_hash = _hash(lease)
    held.attempt.claimed_at = tx.now
    held.attempt.lease_expires_at = tx.now + timedelta(seconds=lease_s)
    tx.note("rollout", run_id=held.run.id, rollout_id=held.rollout.id, state=held.rollout.state)
    file = RunFile.model_validate(held.run.file)
    return RolloutLease(
        session_id=session,
        rollout_id=held.rollout.id,
        attempt=held.attempt.number,
        lease=lease,
        lease_s=lease_s,
        run_id=held.run.id,
        group_id=held.group.id,
        policy=held.run.policy,
        version=held.group.version,
        oldest_version=await _oldest_version(tx, held.run, file) if held.group.purpose == "train" else None,
        purpose="eval" if held.group.purpose == "eval" else "train",
        harness=HarnessRef(name=held.group.harness, profile=held.group.profile),
        task_id=held.task.task_id,
        agent_bundle=held.task.agent_bundle,
        trusted=held.run.trusted,
        sandbox=file.rollouts.sandbox,
        sampling=Sampling(temperature=file.rollouts.temperature),
        budget=Budget(**file.budget.model_dump()),
        prompt_mode="token_in" if held.run.prompt_mode == "token_in" else "render",
        thinking=file.rollouts.thinking,
    )


async def _oldest_version(tx: Transaction, run: Run, file: RunFile) -> int | None:
    """What was sampled by an older version than this would be refused as stale; version 0 is no version of a policy."""
    if file.train is None:
        return None
    return max(1, await versions.newest(tx, run.policy) - file.train.max_staleness)


# Written out: for SQLite SQLAlchemy leaves the tables' names away in all that is returned, also where they are needed.
_BEAT = (
    text("""
        UPDATE attempts SET lease_expires_at = :until
        WHERE id = :session AND ended_at IS NULL AND lease_hash = :lease
        RETURNING
          (SELECT runs.state FROM runs JOIN rollouts ON rollouts.run_id = runs.id WHERE rollouts.id = attempts.rollout_id),
          (SELECT "groups".state FROM "groups" JOIN rollouts ON rollouts.group_id = "groups".id
           WHERE rollouts.id = attempts.rollout_id)
    """)
    .bindparams(bindparam("until", type_=Timestamp()))
    .columns(column("run", Word(RunState)), column("group", Word(GroupState)))
)


async def heartbeat(tx: Transaction, session: str, *, lease: str, lease_s: float) -> Heartbeat:
    """Prolong a lease and say what to do. Raises Conflict where it is lost.

    A lease that ran out but that `expire` has not taken yet still counts: nobody else was given the attempt. The run is not
    locked, so that a thousand beating runners do not stand in the way of what ends attempts; `expire` locks the attempt's row.
    """
    beaten = await tx.session.execute(
        _BEAT, {"session": session, "lease": _hash(lease), "until": tx.now + timedelta(seconds=lease_s)}
    )
    found = beaten.one_or_none()
    if found is None:
        _check_lease(await hold(tx, session), lease)
        raise Conflict(f"attempt {session} is not held")
    run, group = found
    if run is RunState.PAUSED:
        return Heartbeat(lease_s=lease_s, action="pause")
    wanted = run is RunState.RUNNING and group is GroupState.OPEN
    return Heartbeat(lease_s=lease_s, action="continue" if wanted else "cancel")


async def finish(tx: Transaction, message: RolloutFinished, archive: Archive) -> None:
    """Record the end of an attempt with its trace. Raises Conflict where the word comes too late."""
    held = await hold(tx, session_id(message.rollout_id, message.attempt))
    _check_lease(held, message.lease)
    store(tx, archive)
    attempt, rollout = held.attempt, held.rollout
    attempt.exit_code = message.exit_code
    attempt.sandbox = message.sandbox
    attempt.harness_version = message.harness_version
    attempt.snapshot = message.snapshot
    attempt.logs = message.logs
    attempt.sealed = asdict(message.sealed) if message.sealed else None
    attempt.started_at = datetime.fromtimestamp(message.started, UTC) if message.started else None
    rollout.calls = len(archive.calls)
    rollout.sampled_tokens = archive.sampled_tokens
    rollout.version_min, rollout.version_max = archive.version_min, archive.version_max
    outcome, cause, detail = message.outcome, message.cause, storable(message.detail)
    if outcome in GRADED and (fault := _fault(message, archive, held.group.version)):
        outcome, (cause, detail) = Outcome.INFRA_ERROR, fault
    await _settle(tx, held, outcome, cause, detail)


def _fault(message: RolloutFinished, archive: Archive, pinned: int | None) -> tuple[str, str] | None:
    """Why an attempt cannot be graded although its agent ended: cause and detail."""
    if archive.fault is not None:
        return archive.fault
    if message.snapshot is None:
        return "snapshot_failed", "the runner reports no snapshot"
    if pinned is not None and archive.sampled_by - {pinned}:
        return "version_changed", f"version {pinned} was pinned, {sorted(archive.sampled_by)} sampled"
    return None


async def expire(tx: Transaction) -> int:
    """End every attempt whose lease ran out; the number of them."""
    # Runs are locked in one order, so that two orchestrators at this wait for each other and never in a circle.
    lapsed = await tx.session.scalars(
        select(Attempt.id)
        .join(Rollout, Rollout.id == Attempt.rollout_id)
        .where(Attempt.lease_expires_at < tx.now)
        .order_by(Rollout.run_id, Attempt.id)
        .limit(100)
    )
    ended = 0
    for session in lapsed.all():
        held = await hold(tx, session, unheard=True)
        expires_at = held.attempt.lease_expires_at
        if expires_at is None or expires_at >= tx.now:
            continue  # before the lock was ours, another ended it or its runner spoke
        ended += 1
        await _settle(tx, held, Outcome.INFRA_ERROR, "lease_expired", f"runner {held.attempt.runner} fell silent")
    return ended


def conclude(
    tx: Transaction, run: Run, group: Group, rollout: Rollout, outcome: Outcome, cause: str | None, detail: str
) -> None:
    """Give a rollout its last outcome; at the end of the transaction the group closes with the last of them."""
    rollout.outcome = outcome
    rollout.cause = cause
    rollout.detail = detail
    rollout.ended_at = tx.now
    tx.note("rollout", run_id=run.id, rollout_id=rollout.id, state=rollout.state, outcome=outcome, cause=cause)
    tx.at_last(close_complete, (run, group))


async def _settle(tx: Transaction, held: Held, outcome: Outcome, cause: str | None, detail: str) -> None:
    """End an attempt and decide what becomes of its rollout."""
    attempt, rollout, group, run = held.attempt, held.rollout, held.group, held.run
    attempt.outcome = outcome
    attempt.cause = cause
    attempt.detail = detail
    attempt.ended_at = tx.now
    attempt.lease_expires_at = None
    rollout.cause = cause
    rollout.detail = detail
    if outcome in GRADED:
        rollout.state = moved(rollout.state, RolloutState.ARCHIVED)
        if group.state is GroupState.OPEN:
            ask_for_score(tx, rollout)
            return
    else:
        rollout.state = moved(rollout.state, RolloutState.ENDED)
        if await _again(tx, held, outcome, cause):
            return
    if outcome is Outcome.TASK_ERROR and group.state is GroupState.OPEN:
        await dispose(tx, run, group, GroupState.REJECTED, f"task_error: {cause}: {detail}")
    conclude(tx, run, group, rollout, outcome, cause, detail)


def ask_for_score(tx: Transaction, rollout: Rollout) -> None:
    """Tell the verifiers that a snapshot waits."""
    rollout.issued_at = tx.now
    tx.send(ScoreWorkspace(run_id=rollout.run_id, rollout_id=rollout.id, attempt=rollout.attempt))


async def _again(tx: Transaction, held: Held, outcome: Outcome, cause: str | None) -> bool:
    """Plan a new attempt where the fault was ours, the group still wants it and the bound allows.

    What is wanted still was cancelled for a pause, which may be over by the time that its runner is heard.
    """
    wanted = held.group.state is GroupState.OPEN and held.run.state in (RunState.RUNNING, RunState.PAUSED)
    if not wanted or outcome not in (Outcome.INFRA_ERROR, Outcome.CANCELLED):
        return False
    failures = await tx.session.scalar(
        select(func.count()).where(
            Attempt.rollout_id == held.rollout.id,
            Attempt.outcome == Outcome.INFRA_ERROR,
            func.coalesce(Attempt.cause, "") != UNCOUNTED,
        )
    )
    if failures is None or failures >= ATTEMPTS:
        return False
    counted = outcome is Outcome.INFRA_ERROR and cause != UNCOUNTED
    pause = BACKOFF_S * 2 ** (failures - 1) if counted else 0.0
    held.rollout.state = moved(held.rollout.state, RolloutState.PLANNED)
    held.rollout.not_before = tx.now + timedelta(seconds=pause)
    tx.note("rollout", run_id=held.run.id, rollout_id=held.rollout.id, state=held.rollout.state, cause=cause)
    return True


def _current(held: Held) -> None:
    if held.attempt.number != held.rollout.attempt or held.attempt.ended_at is not None:
        raise Conflict(f"attempt {held.attempt.id} is over")


def _check_lease(held: Held, lease: str) -> None:
    _current(held)
    if held.attempt.lease_hash is None or not hmac.compare_digest(held.attempt.lease_hash, _hash(lease)):
        raise Conflict(f"another holds attempt {held.attempt.id}")


def _hash(lease: str) -> str:
    return hashlib.sha256(lease.encode()).hexdigest()
