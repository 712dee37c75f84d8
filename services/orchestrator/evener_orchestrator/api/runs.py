"""Runs: submitted, watched, paused, resumed, cancelled."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import select

from evener.errors import InputError
from evener.runfile import RunFile, explain
from evener_orchestrator.api.wire import Shared, as_json
from evener_orchestrator.context import Context
from evener_orchestrator.ledger import runs
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.find import find
from evener_orchestrator.ledger.models import Run
from evener_orchestrator.ledger.progress import progress, summary

router = APIRouter(prefix="/v1/runs", tags=["runs"])

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Submission(BaseModel):
    """A run file with the digests of what was uploaded before."""

    model_config = ConfigDict(extra="forbid")

    run: dict[str, Any] = Field(description="the run file as JSON")
    tasks: list[Digest] = Field(description="tasks to train on, or to evaluate where the run does not train")
    eval_tasks: list[Digest] = Field(default=[], description="held-out tasks of [eval]")
    weights: Digest = Field(description="the start policy (PUT /v1/policies)")
    trusted: bool = Field(default=False, description="the tasks are the user's own")
    new: bool = Field(default=False, description="start another run although one of this name exists")


@router.post("")
async def submit(body: Submission, shared: Shared) -> Response:
    """Start a run, or go on with the one of the same name; 409 where that one has other content."""
    try:
        file = RunFile.model_validate(body.run)
    except ValidationError as error:
        raise InputError("request_invalid", f"run.{explain(error, RunFile)}") from error
    if not await asyncio.to_thread(shared.blobs.has, "weights", body.weights):
        raise InputError("request_invalid", f"weights: {body.weights} was not uploaded (PUT /v1/policies first)")
    submission = runs.Submission(
        file=file,
        tasks=body.tasks,
        eval_tasks=body.eval_tasks,
        weights=body.weights,
        trusted=body.trusted,
        new=body.new,
    )
    run, resumed = await shared.ledger.write(lambda tx: runs.submit(tx, submission))
    return as_json({"run_id": run.id, "resumed": resumed, "state": run.state, "policy": run.policy})


@router.get("")
async def listing(shared: Shared, limit: int = 50) -> Response:
    """The newest runs."""
    async with shared.ledger.read() as session:
        rows = await session.scalars(select(Run).order_by(Run.id.desc()).limit(limit))
        return as_json([summary(run) for run in rows])


@router.get("/{run}")
async def show(run: str, shared: Shared) -> Response:
    """How far a run is."""
    async with shared.ledger.read() as session:
        return as_json(await progress(session, await find(session, Run, run)))


@router.post("/{run}/cancel")
async def cancel(run: str, shared: Shared) -> Response:
    """End a run; what runs is told by its heartbeat."""
    return await _change(shared, run, runs.cancel)


@router.post("/{run}/pause")
async def pause(run: str, shared: Shared) -> Response:
    """Start nothing more of a run."""
    return await _change(shared, run, runs.pause)


@router.post("/{run}/resume")
async def resume(run: str, shared: Shared) -> Response:
    """Go on with a paused run."""
    return await _change(shared, run, runs.resume)


async def _change(shared: Context, given: str, change: Callable[[Transaction, str], Awaitable[Run]]) -> Response:
    async def work(tx: Transaction) -> Run:
        return await change(tx, (await find(tx.session, Run, given)).id)

    return as_json(summary(await shared.ledger.write(work)))
