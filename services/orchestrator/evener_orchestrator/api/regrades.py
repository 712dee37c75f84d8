"""Snapshots graded again with the verifiers that serve now: asked for by people, shown beside the scores that counted."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from evener_orchestrator.api.wire import Shared, as_json, read_json
from evener_orchestrator.ledger import regrades
from evener_orchestrator.ledger.models import Group, Regrade, Score, Task
from evener_orchestrator.states import GroupState

router = APIRouter(prefix="/v1/regrades", tags=["regrades"])


class Wish(msgspec.Struct):
    """Body of a request: the id of a rollout, a group or a run, or its unique end."""

    of: str


@router.post("")
async def ask(request: Request, shared: Shared) -> Response:
    """Have every scored snapshot of a rollout, a group or a run graded again; no reward is changed by it."""
    wish = await read_json(request, Wish)
    return as_json(await shared.ledger.write(lambda tx: regrades.ask(tx, wish.of)))


@router.get("")
async def listing(shared: Shared, of: str) -> Response:
    """Old and new score of each rollout of a rollout, a group or a run that was graded again; the newest time counts."""
    async with shared.ledger.read() as session:
        return as_json([_shown(*row) for row in await regrades.newest(session, of)])


def _shown(regrade: Regrade, score: Score | None, group: Group, task: Task) -> dict[str, Any]:
    return {
        "regrade_id": regrade.id,
        "rollout_id": regrade.rollout_id,
        "task_id": task.task_id,
        "harness": group.harness,
        "trained": group.state is GroupState.TRAINED,
        "old": _said(score),
        "new": _said(regrade) if regrade.ended_at is not None else None,
        "created_at": regrade.created_at,
        "ended_at": regrade.ended_at,
    }


def _said(score: Score | Regrade | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {"score": score.score, "scores": score.scores, "cause": score.cause, "detail": score.detail}
