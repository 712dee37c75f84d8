"""An evaluation pins one published version: it is planned only when no other is on its way, and holds back the next.

Due are: before training, at the first version published after every ``every`` further steps, and at the final one. Used by the
planner, and by the ledger when a learner asks for a version.
"""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from evener.runfile import RunFile
from evener_orchestrator.ledger.models import Group, PolicyVersion, Run
from evener_orchestrator.states import GroupState, VersionState


async def holds(session: AsyncSession, run: Run, latest: PolicyVersion) -> bool:
    """Whether the engines must keep ``latest`` for an evaluation that runs or is about to."""
    return await running(session, run) or await due(session, run, latest)


async def running(session: AsyncSession, run: Run) -> bool:
    """Whether a group of the evaluation under way is unfinished."""
    if run.evaluating is None:
        return False
    unfinished = select(Group.id).where(
        Group.run_id == run.id,
        Group.purpose == "eval",
        Group.state == GroupState.OPEN,
        Group.version == run.evaluating,
    )
    return await session.scalar(unfinished.limit(1)) is not None


async def due(session: AsyncSession, run: Run, latest: PolicyVersion) -> bool:
    """Whether the next evaluation can be planned now, at ``latest``, the newest published version."""
    if not wanted(RunFile.model_validate(run.file), evaluated=run.evaluated_step, published=latest.step, recorded=run.step):
        return False
    coming = select(PolicyVersion.version).where(
        PolicyVersion.policy == run.policy,
        PolicyVersion.state == VersionState.ALLOTTED,
        PolicyVersion.epoch == run.epoch,
        PolicyVersion.version > latest.version,
    )
    return await session.scalar(coming.limit(1)) is None


def wanted(file: RunFile, *, evaluated: int, published: int, recorded: int) -> bool:
    """Whether the weights of step ``published`` are to be evaluated.

    ``evaluated`` is the step of the last evaluation (-1: none yet), ``recorded`` the last step the learner reported.
    """
    if file.train is None:
        return evaluated < 0
    if file.eval is None:
        return False
    if evaluated < 0:
        return True
    if published >= file.train.steps:
        return recorded >= file.train.steps > evaluated
    every = file.eval.every
    return every > 0 and published // every > evaluated // every
