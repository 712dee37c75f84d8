"""A score is recorded once; the author's fault rejects the group, and ours is tried again and never becomes a zero.

``order`` tells a verifier what to score, and is asked again while it does; ``record`` takes its answer. A snapshot that no
verifier survives is ordered `ORDERS` times. Called by the API and the consumer.
"""

from math import isfinite

from evener.api import ScoreOrder
from evener.errors import CAUSES, Boundary, Outcome
from evener.ids import session_id
from evener.messages import RolloutScored
from evener.runfile import RunFile
from evener_orchestrator.ledger.attempts import ask_for_score, conclude
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.endings import dispose
from evener_orchestrator.ledger.engine import Held, Transaction
from evener_orchestrator.ledger.locks import hold
from evener_orchestrator.ledger.models import Score
from evener_orchestrator.ledger.reissue import REISSUE_S
from evener_orchestrator.ledger.types import storable
from evener_orchestrator.reward import reward
from evener_orchestrator.states import GroupState, RolloutState, moved

SCORINGS = 3
"""Scorings of one snapshot that may fail through a fault of ours before the rollout does."""


ORDERS = 12
"""Verifiers that may begin on one snapshot: each report of a fault and each restart amid a scoring is one, and one that dies of
a snapshot has five before its command is a dead letter."""

SILENT = f"{ORDERS} verifiers began to score it, and none has told a score"


def order(tx: Transaction, held: Held, *, begins: bool) -> ScoreOrder | None:
    """What to score of a locked attempt that `awaits` its score; None where it has failed now, since no verifier tells one.

    Whoever asks is at it, and at its start ``begins``: the command is issued again only `REISSUE_S` later, so that long tests,
    or a score that waits to be read, do not occupy a second verifier.
    """
    held.rollout.issued_at = tx.now
    held.rollout.orders += begins
    if held.rollout.orders > ORDERS:
        _fail(tx, held, Outcome.INFRA_ERROR, "verifier_failed", SILENT)
        return None
    return order_of(held)


def order_of(held: Held, *, regrade: str | None = None) -> ScoreOrder:
    """The order to score the snapshot of a locked attempt."""
    return ScoreOrder(
        session_id=held.attempt.id,
        task_id=held.task.task_id,
        snapshot=held.attempt.snapshot or "",
        agent_bundle=held.task.agent_bundle,
        grader_bundle=held.task.grader_bundle,
        trusted=held.run.trusted,
        sandbox=RunFile.model_validate(held.run.file).rollouts.sandbox,
        again_s=REISSUE_S,
        regrade=regrade,
    )


async def record(tx: Transaction, message: RolloutScored) -> None:
    """Record a verifier's answer. Raises Conflict where the attempt is past scoring."""
    session = session_id(message.rollout_id, message.attempt)
    held = await hold(tx, session)
    _awaiting(held, session)
    cause, detail = fault(message)
    detail = storable(detail)
    if cause is None:
        _grade(tx, held, message)
    elif CAUSES[cause].boundary is Boundary.TASK:
        _store(tx, held, message, None, cause, detail)
        if held.group.state is GroupState.OPEN:
            await dispose(tx, held.run, held.group, GroupState.REJECTED, f"task_error: {cause}: {detail}")
        _fail(tx, held, Outcome.TASK_ERROR, cause, detail)
    else:
        held.rollout.scorings += 1
        if held.rollout.scorings < SCORINGS:
            ask_for_score(tx, held.rollout)
        else:
            _store(tx, held, message, None, cause, detail)
            _fail(tx, held, Outcome.INFRA_ERROR, cause, detail)


def fault(message: RolloutScored) -> tuple[str | None, str]:
    """Cause and detail of what prevented a score; None where the answer is one."""
    if message.cause is not None:
        known = message.cause in CAUSES
        return (message.cause, message.detail) if known else ("verifier_failed", f"{message.cause}: {message.detail}")
    if "reward" not in message.scores:
        return "verifier_failed", "the verifier reports no reward"
    if not all(isfinite(value) and 0 <= value <= 1 for value in message.scores.values()):
        return "reward_invalid", f"scores {message.scores}"
    return None, ""


def _grade(tx: Transaction, held: Held, message: RolloutScored) -> None:
    rollout = held.rollout
    file = RunFile.model_validate(held.run.file)
    outcome = held.attempt.outcome or Outcome.FINISHED
    score = rollout.score = message.scores["reward"]
    rollout.reward = reward(
        score=score,
        outcome=outcome,
        calls=rollout.calls or 0,
        budget_calls=file.budget.calls,
        brevity=file.reward.brevity,
    )
    _store(tx, held, message, score, None, "")
    rollout.state = moved(rollout.state, RolloutState.SCORED)
    conclude(tx, held.run, held.group, rollout, outcome, held.attempt.cause, held.attempt.detail)


def _fail(tx: Transaction, held: Held, outcome: Outcome, cause: str, detail: str) -> None:
    """The scoring failed for good: that is how the attempt ends."""
    held.attempt.outcome = outcome
    held.attempt.cause = cause
    held.attempt.detail = detail
    conclude(tx, held.run, held.group, held.rollout, outcome, cause, detail)


def _store(tx: Transaction, held: Held, message: RolloutScored, score: float | None, cause: str | None, detail: str) -> None:
    tx.session.add(
        Score(
            attempt_id=held.attempt.id,
            rollout_id=held.rollout.id,
            score=score,
            scores=dict(message.scores),
            evidence=message.evidence,
            cause=cause,
            detail=detail,
            seconds=message.seconds,
            created_at=tx.now,
        )
    )


def awaits(held: Held) -> bool:
    """Whether the attempt's own score is still to come."""
    past = held.attempt.number != held.rollout.attempt or held.rollout.state is not RolloutState.ARCHIVED
    return not past and held.rollout.outcome is None


def _awaiting(held: Held, session: str) -> None:
    if not awaits(held):
        raise Conflict(f"attempt {session} is past scoring")
