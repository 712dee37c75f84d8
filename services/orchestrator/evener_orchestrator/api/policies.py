"""Policies: the start weights are uploaded, a learner takes one over and asks for version numbers."""

import asyncio
import io
import tarfile

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import select

from evener.errors import InputError
from evener_orchestrator.api.wire import Shared, as_json, columns, read_json, read_limited
from evener_orchestrator.ledger import learner, versions
from evener_orchestrator.ledger.models import PolicyVersion

router = APIRouter(prefix="/v1/policies", tags=["policies"])

MAX_POLICY_BYTES = 16 << 30
SHOWN = ("policy", "version", "state", "epoch", "step", "weights", "allotted_at", "published_at")


class Claim(msgspec.Struct):
    """Body of a learner's claim."""

    learner: str


class Epoch(msgspec.Struct):
    """Body of a learner's heartbeat."""

    epoch: int


class Release(msgspec.Struct):
    """Body of a learner's release; ``step``: the last that it has reported."""

    epoch: int
    step: int


class Allotment(msgspec.Struct):
    """Body of a request for a version number."""

    epoch: int
    step: int


@router.put("")
async def upload(request: Request, shared: Shared) -> Response:
    """Store a policy folder, sent as a tar file; the answer names the blob."""
    body = await read_limited(request, MAX_POLICY_BYTES, "policy")
    if not await asyncio.to_thread(tarfile.is_tarfile, io.BytesIO(body)):
        raise InputError("request_invalid", "policy: the body is not a tar file")
    return as_json({"weights": await asyncio.to_thread(shared.blobs.put, "weights", body)})


@router.post("/{policy}/learner")
async def claim(policy: str, request: Request, shared: Shared) -> Response:
    """Become the policy's learner; ``null`` where no run trains it now, 409 while another learner holds it."""
    body = await read_json(request, Claim)
    lease_s = shared.settings.lease_s
    return as_json(await shared.ledger.write(lambda tx: learner.claim(tx, policy, learner=body.learner, lease_s=lease_s)))


@router.post("/{policy}/learner/heartbeat")
async def heartbeat(policy: str, request: Request, shared: Shared) -> Response:
    """Prolong a learner's lease; the answer says whether to continue or to cancel."""
    body = await read_json(request, Epoch)
    lease_s = shared.settings.lease_s
    return as_json(await shared.ledger.write(lambda tx: learner.heartbeat(tx, policy, epoch=body.epoch, lease_s=lease_s)))


@router.post("/{policy}/learner/release")
async def release(policy: str, request: Request, shared: Shared) -> Response:
    """End a learner's lease, at once where its last step is recorded."""
    body = await read_json(request, Release)
    return as_json(await shared.ledger.write(lambda tx: learner.release(tx, policy, epoch=body.epoch, step=body.step)))


@router.post("/{policy}/versions")
async def allot(policy: str, request: Request, shared: Shared) -> Response:
    """The number of the next publication; ``wait_s`` > 0 while an evaluation holds the current one."""
    body = await read_json(request, Allotment)
    return as_json(await shared.ledger.write(lambda tx: versions.allot(tx, policy, epoch=body.epoch, step=body.step)))


@router.get("")
async def listing(shared: Shared) -> Response:
    """Every version of every policy, newest first."""
    async with shared.ledger.read() as session:
        rows = await session.scalars(
            select(PolicyVersion).order_by(PolicyVersion.allotted_at.desc(), PolicyVersion.version.desc()).limit(1000)
        )
        return as_json([columns(row, SHOWN) for row in rows])


@router.get("/{policy}/versions/{version}")
async def show(policy: str, version: int, shared: Shared) -> Response:
    """One version."""
    async with shared.ledger.read() as session:
        row = await session.get(PolicyVersion, (policy, version))
        if row is None:
            raise InputError("not_found", f"version {version} of policy {policy!r}")
        return as_json(columns(row, SHOWN))
