"""The bus on RabbitMQ: one connection publishes, one consumes, both made when they are first needed and after every loss.

It belongs to the event loop that uses it first. Two connections, since a broker short of memory or disk stops reading from
those that publish, and acknowledgements must still reach it.
"""

import asyncio
from typing import TypeVar

from aio_pika.exceptions import ChannelNotFoundEntity

from evener.bus.amqp.consumer import AmqpConsumer
from evener.bus.amqp.dead import Graveyard
from evener.bus.amqp.link import Link, Lost, guard, persist
from evener.bus.amqp.publisher import Publisher
from evener.bus.amqp.topology import Topology
from evener.bus.port import PATIENCE_S, DeadLetter
from evener.messages import Message, encode, queue_of

T = TypeVar("T")


class AmqpBus:
    """Topic exchange ``evener``, a quorum queue for every kind of command, dead letters in ``evener.dead``."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._topology = Topology()
        self._consumers = Link(url, "consumer")
        self._publisher = Publisher(Link(url, "publisher"), self._topology, patience_s)
        self._graveyard = Graveyard(self._publisher, self._topology)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._publisher.link.closed

    async def publish(self, message: Message, *, priority: int = 0) -> None:
        """Send, and wait for the broker's confirm. Raises InfraError ``bus_unavailable`` or ``bus_refused``."""
        await self._publisher.send(queue_of(message), encode(message), priority=priority)

    def consume(self, queue: str, *, prefetch: int = 1) -> AmqpConsumer:
        """A consumer of ``queue``; it costs a channel, not a connection."""
        return AmqpConsumer(self._consumers, self._publisher, self._topology, queue, prefetch)

    async def depth(self, queue: str) -> int:
        """How many messages are ready. Raises InfraError."""
        return await persist(
            lambda: self._depth(queue), patience_s=self._patience_s, what=f"counting {queue} on {self._publisher.link.place}"
        )

    async def _depth(self, queue: str) -> int:
        try:
            async with self._publisher.link.asked() as channel:
                declared = await guard(channel.declare_queue(queue, passive=True))
                return declared.declaration_result.message_count or 0
        except Lost as error:
            if isinstance(error.__cause__, ChannelNotFoundEntity):
                return 0
            raise

    async def delete(self, queue: str) -> None:
        """Delete a queue. Raises InfraError."""
        await persist(
            lambda: self._delete(queue), patience_s=self._patience_s, what=f"deleting {queue} on {self._publisher.link.place}"
        )

    async def _delete(self, queue: str) -> None:
        self._topology.forget()
        async with self._publisher.link.asked() as channel:
            await guard(channel.queue_delete(queue))  # an absent one is no error

    async def dead_letters(self, limit: int | None = 100) -> list[DeadLetter]:
        """The oldest dead letters. Raises InfraError."""
        return await persist(
            lambda: self._graveyard.letters(limit), patience_s=self._patience_s, what="listing the dead letters"
        )

    async def retry(self, dead_id: str | None = None, *, queue: str | None = None) -> int:
        """Send one dead letter, or all (of ``queue``), back to its queue. Raises InfraError."""

        def chosen(letter: DeadLetter) -> bool:
            return dead_id in (None, letter.id) and queue in (None, letter.queue)

        sent: set[str] = set()
        await persist(
            lambda: self._graveyard.retry(chosen, sent), patience_s=self._patience_s, what="retrying the dead letters"
        )
        return len(sent)

    async def close(self) -> None:
        """Leave; what consumers hold returns to its queue."""
        await asyncio.gather(self._consumers.close(), self._publisher.link.close())
