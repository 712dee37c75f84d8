"""Whoever changes anything of a run locks the run's row first, so that a run has one writer at a time.

On SQLite the transaction itself is that lock. Used by every repository function that writes.
"""

from dataclasses import dataclass

from sqlalchemy import Function, Select, bindparam, func, select

from evener.errors import InputError
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run

_HELD = (
    select(Attempt, Rollout, Group)
    .join(Rollout, Rollout.id == Attempt.rollout_id)
    .join(Group, Group.id == Rollout.group_id)
    .where(Attempt.id == bindparam("session"))
)
"""Built once: to build it anew was a third of what a look costs."""

_FRESH = _HELD.execution_options(populate_existing=True)
_UNHEARD = _FRESH.with_for_update(of=Attempt)


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt and what it belongs to, under the run's lock."""

    attempt: Attempt
    rollout: Rollout
    group: Group
    run: Run


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
    """The attempt of a session with its rollout, group and run, locked. Raises InputError ``not_found``.

    ``unheard``: also its heartbeats, which do not lock the run, wait now.
    """
    if tx.locked and not unheard and (held := await _under_lock(tx, session_id)) is not None:
        return held
    mine = select(Rollout.run_id).join(Attempt, Attempt.rollout_id == Rollout.id).where(Attempt.id == session_id)
    run = await _lock(tx, select(Run).where(Run.id == mine.scalar_subquery()), f"attempt {session_id}")
    row = await tx.session.execute(_UNHEARD if unheard else _FRESH, {"session": session_id})
    attempt, rollout, group = row.one()
    return Held(attempt, rollout, group, run)


async def _under_lock(tx: Transaction, session_id: str) -> Held | None:
    """The same where this transaction has locked the run before, as it has for all but the first of several works.

    Nothing is written for the question: what the works before have changed is written for all of them at once, later.
    """
    with tx.session.no_autoflush:
        row = (await tx.session.execute(_HELD, {"session": session_id})).one_or_none()
    if row is None:
        return None
    attempt, rollout, group = row
    run = tx.locked.get(group.run_id)
    return None if run is None else Held(attempt, rollout, group, run)


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
    tx.locked[run.id] = run
    return run
