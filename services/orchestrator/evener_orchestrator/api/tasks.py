"""Tasks: uploaded as two bundles, which go to different areas of the blob store."""

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import select, text

from evener.catalogue import CATALOGUE
from evener.errors import InputError
from evener.tasks import MAX_BUNDLE_BYTES, task_digest
from evener_orchestrator.api.wire import Shared, as_json, columns, read_limited
from evener_orchestrator.ledger.models import Task
from evener_orchestrator.ledger.tasks import register

router = APIRouter(prefix="/v1", tags=["tasks"])

SHOWN = ("digest", "task_id", "family", "agent_bundle", "grader_bundle", "created_at")


class Upload(msgspec.Struct):
    """Body of an upload, as MessagePack."""

    id: str
    agent: bytes
    grader: bytes
    family: str = ""


@router.put("/tasks/{digest}")
async def upload(digest: str, request: Request, shared: Shared) -> Response:
    """Store a task: MessagePack of ``id``, ``family``, and the bundles ``agent`` and ``grader``."""
    body = await read_limited(request, 2 * MAX_BUNDLE_BYTES, "task")
    try:
        task = msgspec.msgpack.decode(body, type=Upload)
    except msgspec.DecodeError as error:
        raise InputError("request_invalid", f"task: {error}") from error
    if task_digest(task.agent, task.grader) != digest:
        raise InputError("request_invalid", f"task {task.id}: the bundles are not those of {digest}")
    agent = await asyncio.to_thread(shared.blobs.put, "agent", task.agent)
    grader = await asyncio.to_thread(shared.blobs.put, "grader", task.grader)
    await shared.ledger.write(
        lambda tx: register(tx, digest=digest, task_id=task.id, family=task.family, agent_bundle=agent, grader_bundle=grader)
    )
    return as_json({"task": digest})


@router.get("/tasks")
async def listing(shared: Shared, limit: int = 1000) -> Response:
    """The tasks."""
    async with shared.ledger.read() as session:
        rows = await session.scalars(select(Task).order_by(Task.task_id).limit(limit))
        return as_json([columns(row, SHOWN) for row in rows])


@router.get("/harnesses")
async def harnesses() -> Response:
    """The catalogue: every harness that a run file may name, with its dialect, pinned version and profiles."""
    return as_json(list(CATALOGUE.values()))


@router.get("/harnesses/matrix")
async def matrix(shared: Shared) -> Response:
    """How well each harness did, by run and version (the view ``harness_matrix``)."""
    async with shared.ledger.read() as session:
        rows = await session.execute(text("SELECT * FROM harness_matrix ORDER BY run_id, purpose, version, harness"))
        return as_json([dict(row) for row in rows.mappings()])
