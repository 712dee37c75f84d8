"""Whether a broker takes a message and not only a connection: under a memory or disk alarm it accepts one and takes none.

What is made for the question goes with its connection. Called by ``evener doctor``.
"""

import asyncio
from collections.abc import Sequence

from aio_pika import Message
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity

from evener.bus.amqp.link import Link, Lost, Refused, farewell, guard

TAKE_S = 3.0
"""Longest wait for a confirm; an idle broker gives one within 10 ms."""

LEAST = -10
"""Priority of a consumer; those of Evener's services have 0."""


async def probe(url: str) -> str | None:
    """What is wrong with the broker at ``url``, in one line with what to do; None where nothing is."""
    link = Link(url, "doctor")
    try:
        channel = await link.channel(confirms=True)
        queue = await guard(channel.declare_queue(exclusive=True, auto_delete=True), TAKE_S)
    except Lost as error:
        await link.close()
        return f"{link.place} does not answer: {error}; is RabbitMQ up? see EVENER_AMQP_URL"
    except Refused as error:
        await link.close()
        return f"{link.place} refused: {error}; see EVENER_AMQP_URL and the user's permissions"
    try:
        for _ in range(2):  # the first is what makes a broker under an alarm stop reading
            await guard(channel.default_exchange.publish(Message(b""), queue.name), TAKE_S)
    except (Lost, Refused) as error:
        return f"{link.place} takes no message ({error}): a memory or disk alarm? see `rabbitmq-diagnostics alarms`"
    finally:
        await link.close()
    return None


async def leaderless(url: str, queues: Sequence[str]) -> list[str]:
    """Those of ``queues`` that exist and serve nobody.

    A broker that is killed within half a second of a quorum queue's declaration comes back with one that has no leader, for
    good (rabbitmq-server#15725): what is published to it or consumed from it waits for ever. Raises Lost, Refused.
    """
    link = Link(url, "doctor")
    try:
        found = await asyncio.gather(*(_serves(link, queue) for queue in queues))
    finally:
        await link.close()
    return [queue for queue, serves in zip(queues, found, strict=True) if not serves]


async def _serves(link: Link, queue: str) -> bool:
    """Whether a consumer of an existing queue is accepted; with the least priority, it gets only what nobody else would."""
    channel = await link.channel(confirms=False)
    try:
        try:
            there = await guard(channel.declare_queue(queue, passive=True))
        except Lost as error:
            if isinstance(error.__cause__, ChannelNotFoundEntity):
                return True
            raise
        await guard(channel.set_qos(prefetch_count=1))
        try:
            tag = await guard(there.consume(_keep, arguments={"x-priority": LEAST}), TAKE_S)
        except Lost:
            return False
        await guard(there.cancel(tag))
        return True
    finally:
        await farewell(channel.close())


async def _keep(_message: AbstractIncomingMessage) -> None:
    """A message that comes all the same returns to its queue when the channel closes."""
