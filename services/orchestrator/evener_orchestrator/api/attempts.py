"""What runners and verifiers ask about one attempt."""

import msgspec
from fastapi import APIRouter, Request, Response

from evener_orchestrator.api.wire import Shared, as_json, read_json
from evener_orchestrator.ledger import attempts, regrades, scores
from evener_orchestrator.ledger.conflict import Conflict

router = APIRouter(prefix="/v1/attempts/{session}", tags=["attempts"])


class Claim(msgspec.Struct):
    """Body of a claim."""

    runner: str


class Beat(msgspec.Struct):
    """Body of a heartbeat."""

    lease: str


@router.post("/claim")
async def claim(session: str, request: Request, shared: Shared) -> Response:
    """Lease a queued attempt to a runner; 409 where it is held, over, or its run is not running."""
    body = await read_json(request, Claim)
    lease_s = shared.settings.lease_s
    lease = await shared.requests.write(
        lambda tx: attempts.claim(tx, session, runner=body.runner, lease_s=lease_s), about=session
    )
    return as_json(lease)


@router.post("/heartbeat")
async def heartbeat(session: str, request: Request, shared: Shared) -> Response:
    """Prolong a lease; the answer says whether to continue, pause or cancel."""
    body = await read_json(request, Beat)
    lease_s = shared.settings.lease_s
    return as_json(await shared.ledger.write(lambda tx: attempts.heartbeat(tx, session, lease=body.lease, lease_s=lease_s)))


@router.post("/scoring")
async def scoring(session: str, shared: Shared, begins: bool = False) -> Response:
    """What a verifier that ``begins`` is to score, or what it still scores; 409 where the attempt is past scoring."""
    order = await shared.requests.write(lambda tx: regrades.order(tx, session, begins=begins), about=session)
    if order is None:
        raise Conflict(f"attempt {session} is past scoring: {scores.SILENT}")
    return as_json(order)
