"""Dead letters are read without being lost: each is taken and returned, by closing the channel that took it.

While one listing runs, another sees only the rest. Called by `evener dead ls|show|retry` through the bus.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

from evener.bus.amqp.consumer import REASON
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

    async def letters(self, limit: int) -> list[DeadLetter]:
        """The oldest dead letters. Raises Lost, Refused."""
        async with self._open() as (grave, _):
            return [_letter(raw) async for raw in _take(grave, limit)]

    async def retry(self, dead_id: str | None) -> int:
        """Send one letter, or all that there are now, back to its queue. Raises Lost, Refused, InfraError."""
        done = 0
        async with self._open() as (grave, count):
            async for raw in _take(grave, count):
                letter = _letter(raw)
                if dead_id in (None, letter.id):
                    await self._publisher.send(letter.queue, raw.body, priority=raw.priority or 0)
                    await guard(raw.ack())
                    done += 1
        return done

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
    reason = raw.headers.get(REASON)
    if reason is None:  # buried by the broker: a consumer died of it, or a policy made it go
        reason = f"given up by RabbitMQ: {raw.headers.get('x-first-death-reason', 'unknown')}"
    return DeadLetter(raw.message_id or "", raw.routing_key or "", raw.body, str(reason))
