"""Groups: the learner claims them, people look at them."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import select

from evener.ids import session_id
from evener_orchestrator.api.wire import Shared, as_json, as_msgpack, columns, read_json
from evener_orchestrator.ledger import groups
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.find import find
from evener_orchestrator.ledger.models import Group, Rollout, Run, Task

router = APIRouter(prefix="/v1/groups", tags=["groups"])

SHOWN = (
    "harness", "profile", "purpose", "version", "number", "size", "state", "reason", "step", "staleness",
    "created_at", "closed_at", "disposed_at",
)  # fmt: skip


class Claim(msgspec.Struct):
    """Body of a claim."""

    epoch: int


@router.post("/{group}/claim")
async def claim(group: str, request: Request, shared: Shared) -> Response:
    """Hand a closed group to the policy's learner, as MessagePack (`evener.api.GroupOrder`)."""
    body = await read_json(request, Claim)
    order = await shared.ledger.write(lambda tx: groups.claim(tx, group, epoch=body.epoch))
    if isinstance(order, str):  # the rejection is committed; now refuse
        raise Conflict(order)
    return as_msgpack(order)


@router.get("")
async def listing(shared: Shared, run: str = "latest", limit: int = 100) -> Response:
    """The newest groups of a run."""
    async with shared.ledger.read() as session:
        owner = await find(session, Run, run)
        rows = await session.execute(
            select(Group, Task.task_id)
            .join(Task, Task.digest == Group.task_digest)
            .where(Group.run_id == owner.id)
            .order_by(Group.id.desc())
            .limit(limit)
        )
        return as_json([_shown(group, task) for group, task in rows])


@router.get("/{group}")
async def show(group: str, shared: Shared) -> Response:
    """A group and its rollouts."""
    async with shared.ledger.read() as session:
        row = await find(session, Group, group)
        task = await session.get_one(Task, row.task_digest)
        rollouts = await session.scalars(select(Rollout).where(Rollout.group_id == row.id).order_by(Rollout.number))
        members = [
            {"rollout_id": each.id, "session_id": session_id(each.id, each.attempt) if each.attempt else None}
            | dict(columns(each, ("state", "outcome", "cause", "score", "reward", "calls", "sampled_tokens")))
            for each in rollouts
        ]
        return as_json({**_shown(row, task.task_id), "family": task.family, "rollouts": members})


def _shown(group: Group, task_id: str) -> dict[str, Any]:
    return {"group_id": group.id, "run_id": group.run_id, "task_id": task_id} | dict(columns(group, SHOWN))
