"""Probes: alive, ready (and what is missing), and counters as Prometheus text."""

from fastapi import APIRouter, Response
from redis.exceptions import RedisError
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from evener.errors import EvenerError
from evener.messages import EVENTS
from evener_orchestrator.api.wire import Shared, as_json
from evener_orchestrator.context import Context
from evener_orchestrator.ledger.models import Outgoing, Rollout

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return as_json({"status": "ok"})


@router.get("/readyz")
async def readyz(shared: Shared) -> Response:
    """Database, bus and Redis answer; else 503 with what is missing."""
    missing = await _missing(shared)
    response = as_json({"status": "ok"} if not missing else {"detail": f"missing: {', '.join(missing)}", "missing": missing})
    response.status_code = 503 if missing else 200
    return response


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


async def _missing(shared: Context) -> list[str]:
    missing: list[str] = []
    try:
        async with shared.ledger.read() as session:
            await session.execute(text("SELECT 1"))
    except (SQLAlchemyError, OSError):
        missing.append("database")
    try:
        await shared.bus.depth(EVENTS)
    except (EvenerError, OSError):
        missing.append("bus")
    try:
        await shared.ping_redis()
    except (RedisError, OSError):
        missing.append("redis")
    return missing
