"""Probes: alive, ready (and what is missing), and counters as Prometheus text."""

from fastapi import APIRouter, Response
from sqlalchemy import func, select, text

from evener import health
from evener.messages import EVENTS
from evener_orchestrator.api.wire import Shared, as_json
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.models import Outgoing, Rollout

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return as_json({"status": "ok"})


@router.get("/readyz")
async def readyz(shared: Shared) -> Response:
    """Database, bus and Redis answer; else 503 with what is missing."""
    lacking = await health.missing(
        {"database": lambda: ping(shared.ledger), "bus": lambda: shared.bus.depth(EVENTS), "redis": shared.ping_redis}
    )
    status, body = health.document(lacking)
    return Response(body, status, media_type="application/json")


@router.get("/metrics")
async def metrics(shared: Shared) -> Response:
    """Gauges and counters."""
    async with shared.ledger.read() as session:
        outbox = await session.scalar(select(func.count()).select_from(Outgoing))
        states = await session.execute(select(Rollout.state, func.count()).group_by(Rollout.state))
        rollouts = states.all()
    lines = [
        "# TYPE evener_outbox_messages gauge",
        f"evener_outbox_messages {outbox}",
        "# TYPE evener_events_waiting gauge",
        f"evener_events_waiting {await shared.bus.depth(EVENTS)}",
        "# TYPE evener_rollouts gauge",
        *(f'evener_rollouts{{state="{state}"}} {number}' for state, number in rollouts),
        "# TYPE evener_refused_total counter",
        *(f'evener_refused_total{{word="{word}"}} {number}' for word, number in sorted(shared.refused.items())),
    ]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def ping(ledger: Ledger) -> None:
    """Ask the database for one row. Raises what SQLAlchemy or its driver raises."""
    async with ledger.read() as session:
        await session.execute(text("SELECT 1"))
