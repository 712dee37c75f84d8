"""A task is known by the digest of its two bundles; the same content is stored once. Called by the API."""

from sqlalchemy.dialects import postgresql, sqlite

from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.models import Task


async def register(tx: Transaction, *, digest: str, task_id: str, family: str, agent_bundle: str, grader_bundle: str) -> None:
    """Record a task whose bundles are stored; content that is known keeps its first name."""
    upsert = postgresql.insert if tx.postgres else sqlite.insert
    row = {
        "digest": digest,
        "task_id": task_id,
        "family": family,
        "agent_bundle": agent_bundle,
        "grader_bundle": grader_bundle,
        "created_at": tx.now,
    }
    await tx.session.execute(upsert(Task).on_conflict_do_nothing(), row)
