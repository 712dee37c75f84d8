"""A consumer outlives its channel: after any loss `get` subscribes again under a fresh tag, and the broker delivers again.

aio-pika's robust consumers are not used: they subscribe again under the old tag, which RabbitMQ 4.3 answers by closing the
whole connection after a consumer time-out. Up to 4.2 a time-out closes the channel; both end here in one way.

Rejections are counted in a header of ours, in a new copy of the message. The broker's own count is no measure of failure:
RabbitMQ 3.10 and 4.0 count a `nack` as well, and all versions up to 4.3 count a closed channel. Its limit (in the policy)
stays as a net under consumers that die of a message.
"""

import asyncio
import contextlib
import time
from typing import Self, cast

import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from evener import log
from evener.bus.amqp.link import CLOSE_S, Link, Lost, Refused, farewell, guard, pauses
from evener.bus.amqp.publisher import Publisher
from evener.bus.amqp.topology import Topology
from evener.bus.port import DELIVERY_LIMIT, retry_pause
from evener.errors import InfraError
from evener.messages import DEAD, Message, decode

REJECTIONS = "evener-rejections"
REASON = "evener-reason"
MAX_REASON = 2000
"""Characters of a reason that are kept; a traceback's last lines fit, and headers must fit into one frame of 128 KiB."""

SAY_EVERY_S = 5.0

_log = log.get("bus")


class _Subscription:
    """One channel with one tag; `lost` once either is gone, with all that it delivered."""

    def __init__(self, link: Link, channel: AbstractChannel) -> None:
        self.channel = channel
        self.lost = False
        self._link = link
        self._arrived: asyncio.Queue[AbstractIncomingMessage | None] = asyncio.Queue()
        self._tag = ""

    async def start(self, queue: str, prefetch: int) -> None:
        underlay = await self.channel.get_underlay_channel()
        self._closing = underlay.closing
        self._closing.add_done_callback(self.lose)
        underlay.on_consumer_cancel_callbacks.add(self.lose)
        await guard(self.channel.set_qos(prefetch_count=prefetch))
        source = await self.channel.get_queue(queue, ensure=False)
        try:
            self._tag = await guard(source.consume(self._arrive))
        except BaseException:
            if not self.channel.is_closed:
                # Given up before its answer: deliveries to a channel that reads no more would stop the whole connection.
                await self._link.drop()
            raise

    async def _arrive(self, message: AbstractIncomingMessage) -> None:
        self._arrived.put_nowait(message)

    def lose(self, _: object) -> None:
        self.lost = True
        self._arrived.put_nowait(None)

    async def next(self) -> AbstractIncomingMessage | None:
        """The next message, or None once the subscription is lost; what it had delivered before is delivered again."""
        message = await self._arrived.get()
        if self.lost:
            self._arrived.put_nowait(None)  # for whoever else waits
            return None
        return message

    async def stop(self) -> None:
        """Hand back whatever is unsettled: cancel and nack, which RabbitMQ 4.3 does not count; to close it does."""
        whole, returned = not self.lost and self._tag != "", False
        self.lose(None)  # what is settled from now on, the broker gets back
        try:
            if whole:
                with contextlib.suppress(Lost, Refused):
                    await guard(self._return_all(), CLOSE_S)
                    returned = True
        finally:
            if returned:
                self._link.take_back(self.channel)
            else:
                await farewell(self.channel.close())

    async def _return_all(self) -> None:
        underlay = await self.channel.get_underlay_channel()
        self._closing.cancel()  # an observer of ours alone, since aiormq 7.2
        underlay.on_consumer_cancel_callbacks.discard(self.lose)
        await underlay.basic_cancel(self._tag, timeout=CLOSE_S)  # answered: nothing more comes
        await underlay.basic_nack(0, multiple=True, requeue=True, wait=False)


class AmqpDelivery:
    """A message in hand, on the channel that brought it."""

    def __init__(
        self, consumer: "AmqpConsumer", subscription: _Subscription, raw: AbstractIncomingMessage, message: Message
    ) -> None:
        self.message = message
        self.tag = raw.consumer_tag
        self._consumer = consumer
        self._subscription = subscription
        self._raw = raw
        self._rejections = cast("int", raw.headers.get(REJECTIONS, 0))
        self.redelivered = bool(raw.redelivered) or self._rejections > 0
        self._settled = False

    async def ack(self) -> None:
        """Forget it, if the channel still knows it."""
        await self._settle(ack=True)

    async def _settle(self, *, ack: bool) -> None:
        """Once, and only where the channel still has it: others may use the channel by now, and would lose it by an old tag."""
        settled, self._settled = self._settled, True
        if not settled and not self._subscription.lost:
            await _settle(self._raw, ack=ack)

    async def reject(self, reason: str) -> None:
        """Queue a copy that counts, after a pause, or bury it; the original goes when the broker has the copy."""
        if self._settled:
            return
        rejections = self._rejections + 1
        try:
            if rejections < DELIVERY_LIMIT:
                await asyncio.sleep(retry_pause(rejections))
                if self._settled or self._subscription.lost:
                    return  # returned to its queue meanwhile
                await self._consumer.again(self._raw, rejections)
            else:
                await self._consumer.bury(self._raw, reason, rejections)
        except InfraError as error:
            _log.warning("rejection not recorded; handed back", queue=self._consumer.queue, error=str(error))
            await self.hand_back()
        else:
            await self.ack()

    async def hand_back(self) -> None:
        """Return it to its place."""
        await self._settle(ack=False)


async def _settle(raw: AbstractIncomingMessage, *, ack: bool) -> None:
    try:
        await guard(raw.ack() if ack else raw.nack(requeue=True))
    except (Lost, Refused) as error:
        _log.debug("settled too late; it is delivered again", error=str(error))


class AmqpConsumer:
    """Takes at most ``prefetch`` messages at a time out of one queue, on a channel of the shared consumer connection."""

    def __init__(self, link: Link, publisher: Publisher, topology: Topology, queue: str, prefetch: int) -> None:
        self.queue = queue
        self._link = link
        self._publisher = publisher
        self._topology = topology
        self._prefetch = prefetch
        self._lock = asyncio.Lock()
        self._current: _Subscription | None = None
        self._open = False
        self._said = -SAY_EVERY_S

    async def __aenter__(self) -> Self:
        """Subscribe; where the broker is away, `get` will. Raises InfraError where it refuses."""
        self._open = True
        try:
            await self._subscription()
        except Lost as error:
            _log.warning("not subscribed yet", queue=self.queue, broker=self._link.place, error=str(error))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        current, self._current = self._current, None
        if current is not None:
            await current.stop()

    async def get(self) -> AmqpDelivery:
        """Wait for a message, through any loss of the broker. Raises InfraError where it refuses, or once this is closed."""
        for pause in pauses():
            try:
                subscription = await self._subscription()
                while (raw := await subscription.next()) is not None:
                    delivery = await self._read(subscription, raw)
                    if delivery is not None:
                        return delivery
            except Lost as error:
                self._say(error)
            await asyncio.sleep(pause)
        raise AssertionError("the pauses never end")

    def _say(self, error: Lost) -> None:
        """Log a loss once, however many wait here: an orchestrator takes events in sixteen tasks."""
        if time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            _log.warning("no broker; trying again", queue=self.queue, broker=self._link.place, error=str(error))

    async def _read(self, subscription: _Subscription, raw: AbstractIncomingMessage) -> AmqpDelivery | None:
        try:
            return AmqpDelivery(self, subscription, raw, decode(raw.body))
        except msgspec.DecodeError as error:
            try:
                await self.bury(raw, f"cannot be read: {error}", cast("int", raw.headers.get(REJECTIONS, 0)) + 1)
            except InfraError as failure:
                await _settle(raw, ack=False)
                raise Lost(str(failure)) from failure
            await _settle(raw, ack=True)
            return None

    async def _subscription(self) -> _Subscription:
        async with self._lock:
            if self._current is not None and self._current.lost:
                self._topology.forget()
                await self._current.stop()
                self._current = None
            if self._open and self._current is None:
                self._current = await self._subscribe()
            if self._open and self._current is not None:
                return self._current
        await self.__aexit__()  # closed while this call was subscribing
        raise InfraError("bus_unavailable", f"this consumer of {self.queue} was closed")

    async def _subscribe(self) -> _Subscription:
        try:
            await self._topology.ensure(self._link, self.queue)
            subscription = _Subscription(self._link, await self._link.lend())
            try:
                await subscription.start(self.queue, self._prefetch)
            except BaseException:
                self._topology.forget()
                await subscription.stop()
                raise
        except Refused as error:
            raise InfraError("bus_refused", f"consuming {self.queue} on {self._link.place}: {error}") from error
        return subscription

    async def again(self, raw: AbstractIncomingMessage, rejections: int) -> None:
        """Queue a copy that carries how often it was rejected."""
        await self._publisher.send(self.queue, raw.body, priority=raw.priority or 0, headers={REJECTIONS: rejections})

    async def bury(self, raw: AbstractIncomingMessage, reason: str, rejections: int) -> None:
        """Queue a copy among the dead letters."""
        headers: dict[str, str | int] = {REASON: reason[-MAX_REASON:], REJECTIONS: rejections}
        await self._publisher.send(self.queue, raw.body, priority=raw.priority or 0, headers=headers, exchange=DEAD)
