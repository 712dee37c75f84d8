"""Dead letters are read without being lost: each is taken and returned, by closing the channel that took it.

While one listing runs, another sees only the rest. Called by `evener dead ls|show|retry` through the bus.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

from evener.bus.amqp.consumer import REASON, REJECTIONS
from evener.bus.amqp.link import farewell, guard
from evener.bus.amqp.publisher import Publisher
from evener.bus.amqp.topology import Topology
from evener.bus.port import DeadLetter
from evener.messages import DEAD


class Graveyard:
    """The queue ``evener.dead``."""

    def __init__(self, publisher: Publisher, topology: Topology) -> None:
        self._publisher = publisher
        self._topology = topology

    async def letters(self, limit: int | None) -> list[DeadLetter]:
        """The oldest dead letters. Raises Lost, Refused."""
        async with self._open() as (grave, count):
            return [_letter(raw) async for raw in _take(grave, count if limit is None else limit)]

    async def retry(self, chosen: Callable[[DeadLetter], bool], sent: set[str]) -> None:
        """Send the chosen ones of the letters that there are now back to their queues. Raises Lost, Refused, InfraError.

        ``sent`` gets the id of each that its queue has confirmed; whoever is in it is only removed, so that a call made
        again after a loss sends nothing twice.
        """
        async with self._open() as (grave, count):
            async for raw in _take(grave, count):
                letter = _letter(raw)
                if not chosen(letter):
                    continue
                if letter.id not in sent:
                    await self._publisher.send(letter.queue, raw.body, priority=raw.priority or 0)
                    sent.add(letter.id)
                await guard(raw.ack())
            await guard(grave.declare())  # answered after the acknowledgements, which nothing else confirms

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[tuple[AbstractQueue, int]]:
        await self._topology.ensure(self._publisher.link, DEAD)
        channel = await self._publisher.link.channel(confirms=False)
        try:
            grave = await guard(channel.declare_queue(DEAD, passive=True))
            yield grave, grave.declaration_result.message_count or 0
        finally:
            await farewell(channel.close())


async def _take(grave: AbstractQueue, limit: int) -> AsyncIterator[AbstractIncomingMessage]:
    for _ in range(limit):
        raw = await guard(grave.get(fail=False))
        if raw is None:
            return
        yield raw


def _letter(raw: AbstractIncomingMessage) -> DeadLetter:
    headers = cast("dict[str, Any]", dict(raw.headers))
    died, reason, deaths = raw.timestamp, headers.get(REASON), headers.get(REJECTIONS, 1)
    if reason is None:  # buried by the broker: a consumer died of it, or a policy made it go
        reason = f"given up by RabbitMQ: {headers.get('x-first-death-reason', 'unknown')}"
        newest: dict[str, Any] = next(iter(headers.get("x-death", [])), {})
        died, deaths = newest.get("time"), newest.get("count", 1)
    return DeadLetter(
        id=raw.message_id or "",
        queue=raw.routing_key or "",
        body=raw.body,
        reason=str(reason),
        died=None if died is None else died.timestamp(),
        deaths=int(deaths),
        headers=headers,
    )
