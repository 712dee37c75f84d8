"""Rollouts, for people: what happened, the exact tokens, and the files that an attempt left."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Response
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from evener.errors import InputError
from evener.ids import session_id
from evener_orchestrator.api.wire import Shared, as_json, columns
from evener_orchestrator.context import Context
from evener_orchestrator.ledger.find import find
from evener_orchestrator.ledger.groups import spread
from evener_orchestrator.ledger.models import Attempt, Call, Group, Regrade, Rollout, Run, Score, Sequence, SystemText, Task
from evener_orchestrator.states import GroupState

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"])

ROLLOUT = (
    "number", "state", "attempt", "outcome", "cause", "detail", "score", "reward", "calls", "sampled_tokens",
    "version_min", "version_max", "created_at", "ended_at",
)  # fmt: skip
ATTEMPT = (
    "number", "runner", "outcome", "cause", "detail", "exit_code", "sandbox", "harness_version", "snapshot", "logs",
    "sealed", "created_at", "claimed_at", "started_at", "ended_at",
)  # fmt: skip
SCORE = ("attempt_id", "score", "scores", "evidence", "cause", "detail", "seconds")
CALL = (
    "number", "parent_id", "call_class", "fork", "fork_from", "fork_position", "fork_was", "fork_now", "prompt_tokens",
    "version_dispatch", "version_completion", "request", "reply", "dialect",
    "delivered", "level", "engine", "started_at", "ended_at",
)  # fmt: skip


_evidence: Any = Score.evidence  # SQLAlchemy's types do not know that a document has parts
_JUDGED = (_evidence["tier"].as_string(), _evidence["tampered"].as_boolean())


@router.get("")
async def listing(shared: Shared, run: str = "latest", outcome: str | None = None, limit: int = 100) -> Response:
    """The newest rollouts of a run (with one outcome)."""
    async with shared.ledger.read() as session:
        owner = await find(session, Run, run)
        statement = (
            select(Rollout, Group, Task, *_JUDGED)
            .join(Group, Group.id == Rollout.group_id)
            .join(Task, Task.digest == Group.task_digest)
            .outerjoin(Attempt, (Attempt.rollout_id == Rollout.id) & (Attempt.number == Rollout.attempt))
            .outerjoin(Score, Score.attempt_id == Attempt.id)
            .where(Rollout.run_id == owner.id)
            .order_by(Rollout.id.desc())
            .limit(limit)
        )
        if outcome is not None:
            statement = statement.where(Rollout.outcome == outcome)
        rows = await session.execute(statement)
        return as_json([{**_shown(row, group, task), "tier": tier, "tampered": hit} for row, group, task, tier, hit in rows])


@router.get("/{rollout}")
async def show(rollout: str, shared: Shared) -> Response:
    """A rollout with its attempts, its scores, and those of snapshots that were graded again."""
    async with shared.ledger.read() as session:
        row = await find(session, Rollout, rollout)
        group = await session.get_one(Group, row.group_id)
        task = await session.get_one(Task, group.task_digest)
        attempts = await session.scalars(select(Attempt).where(Attempt.rollout_id == row.id).order_by(Attempt.number))
        scores = await session.scalars(select(Score).where(Score.rollout_id == row.id))
        regrades = await session.scalars(select(Regrade).where(Regrade.rollout_id == row.id).order_by(Regrade.id))
        return as_json(
            {
                **_shown(row, group, task),
                "attempts": [{"session_id": each.id, **columns(each, ATTEMPT)} for each in attempts],
                "scores": [columns(each, SCORE) for each in scores],
                "regrades": [columns(each, (*SCORE, "created_at", "ended_at")) for each in regrades],
            }
        )


@router.get("/{rollout}/trace")
async def trace(rollout: str, shared: Shared) -> Response:
    """Every call of the last attempt: messages, reply, and the tokens after the parent's.

    Of each token: id, mask (1: trained), log-probability, policy version.
    """
    async with shared.ledger.read() as session:
        row, attempt = await _last_attempt(session, rollout)
        calls = (await session.scalars(select(Call).where(Call.attempt_id == attempt).order_by(Call.number))).all()
        spans = await session.scalars(select(Sequence.spans).where(Sequence.attempt_id == attempt))
        trained = {span["call_id"] for each in spans for span in each if span["kind"] == "sampled"}
        digests = {digest for call in calls for digest in _digests(call.request)}
        texts = await session.execute(select(SystemText.digest, SystemText.body).where(SystemText.digest.in_(digests)))
        return as_json(
            {
                "rollout_id": row.id,
                "session_id": attempt,
                "calls": [
                    {"call_id": call.id, **columns(call, CALL), "tokens": _tokens(call, trained=call.id in trained)}
                    for call in calls
                ],
                "texts": dict(texts.all()),
            }
        )


@router.get("/{rollout}/sequences")
async def sequences(rollout: str, shared: Shared) -> Response:
    """The training rows of the last attempt; all arrays are equally long."""
    async with shared.ledger.read() as session:
        row, attempt = await _last_attempt(session, rollout)
        rows = await session.scalars(select(Sequence).where(Sequence.attempt_id == attempt).order_by(Sequence.number))
        return as_json({"rollout_id": row.id, "session_id": attempt, "sequences": [_sequence(each) for each in rows]})


@router.get("/{rollout}/logs")
async def logs(rollout: str, shared: Shared) -> Response:
    """What the agent of the last attempt wrote to its standard streams."""
    return Response(await _blob(shared, rollout, "logs"), media_type="text/plain; charset=utf-8")


@router.get("/{rollout}/snapshot")
async def snapshot(rollout: str, shared: Shared) -> Response:
    """The workspace that the last attempt left, as a tar file."""
    return Response(await _blob(shared, rollout, "snapshots"), media_type="application/x-tar")


async def _blob(shared: Context, rollout: str, area: Literal["logs", "snapshots"]) -> bytes:
    async with shared.ledger.read() as session:
        row, attempt_id = await _last_attempt(session, rollout)
        attempt = await session.get_one(Attempt, attempt_id)
    digest = attempt.logs if area == "logs" else attempt.snapshot
    if digest is None:
        raise InputError("not_found", f"{area} of rollout {row.id}")
    return await asyncio.to_thread(shared.blobs.get, area, digest)


async def _last_attempt(session: AsyncSession, rollout: str) -> tuple[Rollout, str]:
    row = await find(session, Rollout, rollout)
    if row.attempt == 0:
        raise InputError("not_found", f"attempt of rollout {row.id}: it is still planned")
    return row, session_id(row.id, row.attempt)


def _shown(rollout: Rollout, group: Group, task: Task) -> dict[str, Any]:
    return {
        "rollout_id": rollout.id,
        "run_id": rollout.run_id,
        "group_id": group.id,
        "task_id": task.task_id,
        "family": task.family,
        "harness": group.harness,
        "profile": group.profile,
        "purpose": group.purpose,
        "version": group.version,
        "trained": group.state is GroupState.TRAINED,
        **columns(rollout, ROLLOUT),
    }


def _tokens(call: Call, *, trained: bool) -> dict[str, Any]:
    """Tokens of a call after its parent's: context (mask 0), then the completion."""
    context, sampled = len(call.context_ids), len(call.completion_ids)
    versions = [0] * context + [version for start, end, version in call.version_runs for _ in range(end - start)]
    return {
        "start": call.prompt_tokens - context,
        "ids": call.context_ids.tolist() + call.completion_ids.tolist(),
        "mask": [0] * context + [int(trained)] * sampled,
        "logprobs": [0.0] * context + call.logprobs.tolist(),
        "versions": versions,
    }


def _sequence(row: Sequence) -> dict[str, Any]:
    mask, versions = spread(row.mask_runs, row.version_runs, len(row.token_ids))
    return {
        "sequence_id": row.id,
        "ids": row.token_ids.tolist(),
        "mask": mask.tolist(),
        "logprobs": row.logprobs.tolist(),
        "versions": versions.tolist(),
        "spans": row.spans,
        "provenance": row.provenance,
        "digest": row.digest,
    }


def _digests(request: dict[str, Any]) -> list[str]:
    tools = request.get("tools_digest")
    return [*request.get("system_digests", []), *([tools] if tools else [])]
