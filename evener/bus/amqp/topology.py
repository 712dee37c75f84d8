"""The names on the broker, declared where they are absent: in code only what a queue is, in policies how much it may do.

A queue that exists with other arguments cannot be declared again, so the arguments here are the type and the dead-letter
exchange and nothing else; limits are in ``compose/rabbitmq/definitions.json`` and can be changed on a running broker.
"""

import asyncio

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel

from evener.bus.amqp.link import Link, guard
from evener.messages import DEAD

EXCHANGE = "evener"

WORK = {"x-queue-type": "quorum", "x-dead-letter-exchange": DEAD}

# A classic queue: listing takes and returns every message, and a quorum queue counts that as a failed delivery (RabbitMQ
# 3.10 to 4.3) and drops the message at its limit, which from 4.0 on is 20 where no policy says otherwise.
GRAVE = {"x-queue-type": "classic"}


class Topology:
    """What this bus has declared; `forget` makes it declare again, should the broker have lost its data."""

    def __init__(self) -> None:
        self._declared: set[str] = set()
        self._declaring: dict[tuple[Link, str], asyncio.Task[None]] = {}

    def forget(self) -> None:
        """Trust nothing that was declared."""
        self._declared.clear()

    async def ensure(self, link: Link, queue: str) -> None:
        """Make ``queue`` and the way to it, on a channel that nobody else uses: a refused declaration closes it."""
        if queue in self._declared:
            return
        task = self._declaring.get((link, queue))
        if task is None:  # a hundred who publish at once declare it once, or fail at once
            task = self._declaring[link, queue] = asyncio.create_task(self._declare(link, queue))
            task.add_done_callback(lambda ended: self._over(link, queue, ended))
        await asyncio.shield(task)

    async def _declare(self, link: Link, queue: str) -> None:
        async with link.asked() as channel:
            await _declare(channel, queue)
        self._declared.add(queue)

    def _over(self, link: Link, queue: str, ended: "asyncio.Task[None]") -> None:
        del self._declaring[link, queue]
        if not ended.cancelled():
            ended.exception()  # everyone who waited may have been cancelled


async def _declare(channel: AbstractChannel, queue: str) -> None:
    exchange = await guard(channel.declare_exchange(EXCHANGE, ExchangeType.TOPIC, durable=True))
    graveyard = await guard(channel.declare_exchange(DEAD, ExchangeType.FANOUT, durable=True))  # keeps the routing key
    grave = await guard(channel.declare_queue(DEAD, durable=True, arguments={**GRAVE}))
    await guard(grave.bind(graveyard))
    if queue != DEAD:
        work = await guard(channel.declare_queue(queue, durable=True, arguments={**WORK}))
        await guard(work.bind(exchange, routing_key=queue))
