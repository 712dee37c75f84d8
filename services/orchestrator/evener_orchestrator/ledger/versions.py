"""A version number is allotted once and never again; an evaluation keeps the engines at the version it pins.

``allot`` serves the learner, ``published`` its event; ``latest`` is what the engines of a policy serve.
"""

from sqlalchemy import bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from evener.api import VersionGrant
from evener.messages import PolicyPublished
from evener_orchestrator import evaluation
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.locks import lock_policy
from evener_orchestrator.ledger.models import PolicyVersion, Run
from evener_orchestrator.states import RunState, VersionState, moved

HOLD_S = 0.5
"""How soon a learner asks again while an evaluation runs: short beside an evaluation, long beside a request."""


_LATEST = (
    select(PolicyVersion)
    .where(PolicyVersion.policy == bindparam("policy"), PolicyVersion.state == VersionState.PUBLISHED)
    .order_by(PolicyVersion.version.desc())
    .limit(1)
)


async def latest(session: AsyncSession, policy: str) -> PolicyVersion:
    """The newest published version."""
    return (await session.scalars(_LATEST, {"policy": policy})).one()


async def newest(tx: Transaction, policy: str) -> int:
    """The number of the newest published version of a policy whose run is locked; one look a transaction."""
    if policy not in tx.newest:
        with tx.session.no_autoflush:  # what shares a transaction is written together
            tx.newest[policy] = (await latest(tx.session, policy)).version
    return tx.newest[policy]


async def allot(tx: Transaction, policy: str, *, epoch: int, step: int) -> VersionGrant:
    """The number of the next publication, or how long to wait. Raises Conflict where the epoch is old or the run is over."""
    run = await lock_policy(tx, policy)
    check_epoch(run, epoch)
    mine = await tx.session.scalar(
        select(PolicyVersion.version).where(
            PolicyVersion.policy == policy,
            PolicyVersion.state == VersionState.ALLOTTED,
            PolicyVersion.epoch == epoch,
            PolicyVersion.step == step,
        )
    )
    if mine is not None:  # the answer to an earlier request was lost
        return VersionGrant(version=mine)
    if await evaluation.holds(tx.session, run, await latest(tx.session, policy)):
        return VersionGrant(wait_s=HOLD_S)
    greatest = await tx.session.scalar(select(func.max(PolicyVersion.version)).where(PolicyVersion.policy == policy))
    version = (greatest or 0) + 1
    tx.session.add(
        PolicyVersion(policy=policy, version=version, state=VersionState.ALLOTTED, epoch=epoch, step=step, allotted_at=tx.now)
    )
    return VersionGrant(version=version)


async def published(tx: Transaction, message: PolicyPublished) -> None:
    """Record that the engines serve a version. Raises Conflict where it was not allotted to this epoch."""
    run = await lock_policy(tx, message.policy)
    check_epoch(run, message.epoch)
    await serve(tx, run, message.version, epoch=message.epoch, step=message.step, weights=message.weights)


async def serve(tx: Transaction, run: Run, version: int, *, epoch: int, step: int, weights: str) -> None:
    """Make an allotted version of a locked run the published one; Conflict where it was not allotted to ``epoch``."""
    row = await tx.session.get(PolicyVersion, (run.policy, version))
    if row is None or row.epoch != epoch:
        raise Conflict(f"version {version} of {run.policy} was not allotted to epoch {epoch}")
    if row.state is not VersionState.ALLOTTED:
        return
    row.state = moved(row.state, VersionState.PUBLISHED)
    tx.newest.pop(run.policy, None)
    row.weights = weights
    row.step = step
    row.published_at = tx.now
    tx.note("policy", run_id=run.id, policy=run.policy, version=row.version, step=row.step)


def check_epoch(run: Run, epoch: int) -> None:
    """Raises Conflict where another learner may speak, or none."""
    check_newest(run, epoch)
    if run.state not in (RunState.RUNNING, RunState.PAUSED):
        raise Conflict(f"the run is {run.state}")


def check_newest(run: Run, epoch: int) -> None:
    """Raises Conflict where another learner may speak."""
    if epoch != run.epoch:
        raise Conflict(f"epoch {epoch} is not the learner's: the ledger is at {run.epoch}")
