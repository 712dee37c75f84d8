"""A message that `send` returned from is on the broker's disk; one that is in doubt is sent again, never dropped.

All publishers of a process share one channel with confirms, so that gathered calls share the broker's fsync.
"""

import asyncio
import time

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractExchange
from aio_pika.exceptions import DeliveryError, PublishError

from evener.bus.amqp.link import Link, Lost, NotTaken, Refused, guard, persist
from evener.bus.amqp.topology import EXCHANGE, Topology
from evener.errors import InfraError

Headers = dict[str, str | int]

MAX_BODY = 16 * 1024 * 1024
"""RabbitMQ 4's ``max_message_size``; a longer message would close the channel under everybody else's."""


class Publisher:
    """Sends with persistence, ``mandatory`` and a confirm, through any loss for ``patience_s``."""

    def __init__(self, link: Link, topology: Topology, patience_s: float) -> None:
        self.link = link
        self._topology = topology
        self._patience_s = patience_s
        self._lock = asyncio.Lock()
        self._channel: AbstractChannel | None = None

    async def send(
        self, queue: str, body: bytes, *, priority: int, headers: Headers | None = None, exchange: str = EXCHANGE
    ) -> None:
        """Put ``body`` into ``queue``, or by another exchange where ``queue`` is only the key. Raises InfraError."""
        if len(body) > MAX_BODY:
            raise InfraError("bus_refused", f"a message of {len(body)} bytes for {queue}: at most {MAX_BODY}")
        started = time.time()

        async def attempt() -> None:
            # No message id of ours: aiormq finds the sender of a returned message by it, so it must be new each time.
            message = Message(
                body,
                content_type="application/json",
                delivery_mode=DeliveryMode.PERSISTENT,
                priority=priority,
                headers=dict(headers or {}),
                timestamp=started,
            )
            await self._topology.ensure(self.link, queue)
            await self._publish(await self._exchange(exchange), message, queue)

        try:
            await persist(attempt, patience_s=self._patience_s, what=f"publishing to {queue} on {self.link.place}")
        except InfraError:
            self._topology.forget()
            raise

    async def _publish(self, exchange: AbstractExchange, message: Message, queue: str) -> None:
        try:
            await guard(_mapped(exchange, message, queue))
        except Refused as error:  # closed by a neighbour's message, or by a broker that knows the exchange no more
            self._topology.forget()
            raise Lost(str(error)) from error
        except Lost:
            self._topology.forget()
            raise

    async def _exchange(self, name: str) -> AbstractExchange:
        async with self._lock:
            channel = self._channel
            if channel is None or channel.is_closed:
                channel = self._channel = await self.link.channel(confirms=True)
            return await channel.get_exchange(name, ensure=False)


async def _mapped(exchange: AbstractExchange, message: Message, queue: str) -> None:
    try:
        await exchange.publish(message, routing_key=queue, mandatory=True)
    except PublishError as error:
        raise NotTaken("no queue takes it") from error
    except DeliveryError as error:
        raise NotTaken("the broker did not accept it (is the queue full?)") from error
