"""Every event is applied in one transaction and acknowledged after its commit; a late or repeated one changes nothing.

Events that wait share one (`ledger.together`), in any order. A refusal is counted and acknowledged. While a store is down the
message is held and tried again: handed back it would count toward RabbitMQ's own delivery limit (on 3.10 and 4.0), and be a
dead letter after some minutes. Any other failure rejects it, and the bus makes it a dead letter at the limit. Run by `loops`.
"""

import asyncio
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from evener import log
from evener.bus import Consumer, Delivery
from evener.errors import EvenerError, InputError
from evener.ids import session_id
from evener.messages import (
    EVENTS,
    GroupClosed,
    Message,
    PolicyPublished,
    RolloutFinished,
    RolloutScored,
    StepFinished,
)
from evener_orchestrator.context import Context
from evener_orchestrator.ledger import Transaction, attempts, regrades, scores, steps, versions
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.faults import FAULTS, is_down

Effect = Callable[[Transaction], Awaitable[None]]

PREFETCH = 16
PAUSE_S = 1.0
"""After a failure: deliveries before a dead letter span seconds and not milliseconds, and a store is asked once a second."""

_log = log.get("orchestrator")


async def consume(context: Context) -> None:
    """Apply events until cancelled."""
    async with context.bus.consume(EVENTS, prefetch=PREFETCH) as events, asyncio.TaskGroup() as tasks:
        for _ in range(PREFETCH):
            tasks.create_task(_settle_each(context, events))


async def _settle_each(context: Context, events: Consumer) -> None:
    while True:
        await settle(context, await events.get())


async def settle(context: Context, delivery: Delivery) -> None:
    """Apply one event and settle its delivery."""
    message = delivery.message
    name = type(message).__name__
    try:
        await _apply_when_up(context, message)
    except (Conflict, InputError) as refusal:  # InputError: about a rollout or policy that this ledger never had
        context.refused[name] += 1
        _log.info("refused", message=name, reason=str(refusal))
    except Exception as error:  # noqa: BLE001 - a supervisor: one bad message must not stop the ledger
        _log.error("event_failed", message=name, message_id=message.message_id, exc_info=error)
        await asyncio.sleep(PAUSE_S)
        await delivery.reject(f"{type(error).__name__}: {error}")
        return
    await delivery.ack()


async def _apply_when_up(context: Context, message: Message) -> None:
    """Apply one event, again and again while a store is down."""
    while True:
        try:
            return await apply(context, message)
        except (RedisError, *FAULTS) as error:
            if not (isinstance(error, RedisError) or is_down(error)):
                raise
            _log.warning("store_down", message=type(message).__name__, error=str(error))
        await asyncio.sleep(PAUSE_S)


async def apply(context: Context, message: Message) -> None:
    """Apply one event. Raises Conflict where it comes too late."""
    about = session_id(message.rollout_id, message.attempt) if isinstance(message, RolloutFinished | RolloutScored) else ""
    await context.events.write(await _effect(context, message), about=about)


async def _effect(context: Context, message: Message) -> Effect:
    """What an event does in a transaction. A trace is read here, before it: the writer never waits for Redis."""
    match message:
        case RolloutFinished():
            session = session_id(message.rollout_id, message.attempt)
            graded = message.outcome in attempts.GRADED
            archive = await context.archiver.read(session, sealed=message.sealed, graded=graded)
            return lambda tx: attempts.finish(tx, message, archive)
        case RolloutScored(regrade=None):
            return lambda tx: scores.record(tx, message)
        case RolloutScored():
            return lambda tx: regrades.record(tx, message)
        case GroupClosed():
            return lambda tx: steps.group_closed(tx, message)
        case StepFinished():
            return lambda tx: steps.finished(tx, message)
        case PolicyPublished():
            return lambda tx: versions.published(tx, message)
        case _:
            raise EvenerError("internal", f"{type(message).__name__} is a command, not an event")
