"""Whoever changes anything of a run locks the run's row first, so that a run has one writer at a time.

On SQLite the transaction itself is that lock. Used by every repository function that writes.
"""

from sqlalchemy import Function, Select, bindparam, func, select

from evener.errors import InputError
from evener_orchestrator.ledger.engine import Held, Transaction
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run, Task

_HELD = (
    select(Attempt, Rollout, Group, Task)
    .join(Rollout, Rollout.id == Attempt.rollout_id)
    .join(Group, Group.id == Rollout.group_id)
    .join(Task, Task.digest == Group.task_digest)
    .where(Rollout.run_id == bindparam("run"), Attempt.id.in_(bindparam("sessions", expanding=True)))
    .execution_options(populate_existing=True)
)
"""Built once: to build it anew was a third of what a look costs."""

_UNHEARD = _HELD.with_for_update(of=Attempt)


async def lock_run(tx: Transaction, run_id: str) -> Run:
    """The run, locked. Raises InputError ``not_found``."""
    return await _lock(tx, select(Run).where(Run.id == run_id), f"run {run_id}")


async def lock_policy(tx: Transaction, policy: str) -> Run:
    """The run that owns a policy, locked. Raises InputError ``not_found``."""
    return await _lock(tx, select(Run).where(Run.policy == policy), f"policy {policy}")


async def lock_group(tx: Transaction, group_id: str) -> tuple[Run, Group]:
    """A group and its run, locked. Raises InputError ``not_found``."""
    owner = select(Group.run_id).where(Group.id == group_id).scalar_subquery()
    run = await _lock(tx, select(Run).where(Run.id == owner), f"group {group_id}")
    return run, (await tx.session.execute(select(Group).where(Group.id == group_id))).scalar_one()


async def hold(tx: Transaction, session_id: str, *, unheard: bool = False) -> Held:
    """The attempt of a session with what it belongs to, locked. Raises InputError ``not_found``.

    What else the transaction is about and the lock covers is read with it: nobody else changes that until the commit.
    ``unheard``: also the attempt's heartbeats, which do not lock the run, wait now.
    """
    if not unheard and (known := tx.held.get(session_id)):
        return known
    mine = select(Rollout.run_id).join(Attempt, Attempt.rollout_id == Rollout.id).where(Attempt.id == session_id)
    run = await _lock(tx, select(Run).where(Run.id == mine.scalar_subquery()), f"attempt {session_id}")
    sessions = [session_id] if unheard else [session_id, *tx.about]
    rows = await tx.session.execute(_UNHEARD if unheard else _HELD, {"run": run.id, "sessions": sessions})
    tx.held |= {attempt.id: Held(attempt, rollout, group, task, run) for attempt, rollout, group, task in rows}
    return tx.held[session_id]


async def take_turn(tx: Transaction, what: str) -> bool:
    """Whether ``what`` is this transaction's to do; False where another transaction is at it now."""
    if not tx.postgres:
        return True
    return bool(await tx.session.scalar(select(func.pg_try_advisory_xact_lock(_key(what)))))


async def await_turn(tx: Transaction, what: str) -> None:
    """Wait until no other transaction is at ``what``: for what has no row to lock yet."""
    if tx.postgres:
        await tx.session.execute(select(func.pg_advisory_xact_lock(_key(what))))


def _key(what: str) -> Function[int]:
    return func.hashtextextended(what, 0)


async def _lock(tx: Transaction, statement: Select[Run], what: str) -> Run:
    # populate_existing: a row that was read before it was locked may have changed meanwhile.
    locked = statement.with_for_update().execution_options(populate_existing=True)
    run = (await tx.session.execute(locked)).scalar_one_or_none()
    if run is None:
        raise InputError("not_found", what)
    return run
