"""What changed lately: a long poll for screens. A hint to look, never the truth."""

from fastapi import APIRouter, Response

from evener_orchestrator.api.wire import Shared, as_json
from evener_orchestrator.ledger.find import find
from evener_orchestrator.ledger.models import Run

router = APIRouter(prefix="/v1/events", tags=["events"])

LONGEST_S = 30.0


@router.get("")
async def listen(shared: Shared, run: str | None = None, after: int = 0, timeout_s: float = 20.0) -> Response:
    """Changes whose ``number`` is greater than ``after``; waits up to ``timeout_s`` for the first."""
    run_id = None
    if run is not None:
        async with shared.ledger.read() as session:
            run_id = (await find(session, Run, run)).id
    return as_json(await shared.feed.after(after, run_id=run_id, timeout=min(max(timeout_s, 0.0), LONGEST_S)))
