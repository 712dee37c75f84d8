"""The embedded bus: queues in this process, safe to publish to and consume from on any thread's event loop.

It forgets everything with the process; the ledger issues again whatever has no effect at the next start.
"""

import asyncio
import contextlib
import heapq
import threading
import time
from dataclasses import dataclass, field
from typing import Self

import msgspec

from evener.bus.port import DELIVERY_LIMIT, DeadLetter, retry_pause
from evener.ids import new_id
from evener.messages import Message, decode, encode, queue_of


@dataclass(order=True, slots=True)
class _Entry:
    order: tuple[int, int]  # (-priority, number): the greater priority first, then the older
    body: bytes = field(compare=False)
    rejections: int = field(default=0, compare=False)
    redelivered: bool = field(default=False, compare=False)


@dataclass(slots=True)
class _Queue:
    entries: list[_Entry] = field(default_factory=list)
    waiters: list["MemoryConsumer"] = field(default_factory=list)


class MemoryBus:
    """Queues by name; every state is guarded by one lock that is never held across an await."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, _Queue] = {}
        self._dead: dict[str, tuple[DeadLetter, _Entry]] = {}
        self._number = 0

    async def publish(self, message: Message, *, priority: int = 0) -> None:
        """Queue a message; it is encoded here, so that what a consumer sees is what a broker would have carried."""
        self.put(queue_of(message), encode(message), priority=priority)

    def put(self, queue: str, body: bytes, *, priority: int = 0) -> None:
        """Queue a body as it is; called from any thread."""
        with self._lock:
            self._number += 1
            self._push(queue, _Entry((-priority, self._number), body))

    def consume(self, queue: str, *, prefetch: int = 1) -> "MemoryConsumer":
        """A consumer of ``queue``."""
        return MemoryConsumer(self, queue, prefetch)

    async def depth(self, queue: str) -> int:
        """How many messages wait."""
        with self._lock:
            return len(self._queues[queue].entries) if queue in self._queues else 0

    async def delete(self, queue: str) -> None:
        """Forget a queue."""
        with self._lock:
            self._queues.pop(queue, None)

    async def dead_letters(self, limit: int | None = 100) -> list[DeadLetter]:
        """The oldest dead letters."""
        with self._lock:
            return [letter for letter, _ in self._dead.values()][:limit]

    async def retry(self, dead_id: str | None = None, *, queue: str | None = None) -> int:
        """Queue one dead letter, or all (of ``queue``), again."""
        with self._lock:
            letters = [letter for letter, _ in self._dead.values() if queue in (None, letter.queue)]
            chosen = [letter.id for letter in letters if dead_id in (None, letter.id)]
            for name in chosen:
                letter, entry = self._dead.pop(name)
                entry.rejections = 0
                self._push(letter.queue, entry)
            return len(chosen)

    @property
    def closed(self) -> bool:
        """A bus of this process never refuses."""
        return False

    async def close(self) -> None:
        """Nothing is held elsewhere."""

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue())

    def _push(self, name: str, entry: _Entry) -> None:
        queue = self._queue(name)
        heapq.heappush(queue.entries, entry)
        for waiter in queue.waiters:
            waiter.wake()

    def take(self, name: str) -> _Entry | None:
        """The next entry of a queue, if any."""
        with self._lock:
            entries = self._queue(name).entries
            return heapq.heappop(entries) if entries else None

    def give_back(self, name: str, entry: _Entry) -> None:
        """Queue an entry again at its old place."""
        entry.redelivered = True
        with self._lock:
            self._push(name, entry)

    def bury(self, name: str, entry: _Entry, reason: str) -> None:
        """Make an entry a dead letter."""
        letter = DeadLetter(new_id(), name, entry.body, reason, died=time.time(), deaths=entry.rejections)
        with self._lock:
            self._dead[letter.id] = (letter, entry)

    def register(self, name: str, consumer: "MemoryConsumer", *, present: bool) -> None:
        """Add or remove a consumer that wants to be woken."""
        with self._lock:
            waiters = self._queue(name).waiters
            if present:
                waiters.append(consumer)
            elif consumer in waiters:
                waiters.remove(consumer)


class MemoryDelivery:
    """A message in hand."""

    def __init__(self, consumer: "MemoryConsumer", entry: _Entry, message: Message) -> None:
        self._consumer = consumer
        self._entry = entry
        self.message = message
        self.redelivered = entry.redelivered

    async def ack(self) -> None:
        """Forget it."""
        self._consumer.settle(self)

    async def reject(self, reason: str) -> None:
        """Queue it again after a pause, or make it a dead letter."""
        if not self._consumer.holds(self):
            return
        consumer, entry = self._consumer, self._entry
        if entry.rejections + 1 < DELIVERY_LIMIT:
            await asyncio.sleep(retry_pause(entry.rejections + 1))
        if not consumer.settle(self):
            return
        entry.rejections += 1
        if entry.rejections < DELIVERY_LIMIT:
            consumer.bus.give_back(consumer.queue, entry)
        else:
            consumer.bus.bury(consumer.queue, entry, reason)

    async def hand_back(self) -> None:
        """Queue it again, uncounted."""
        if self._consumer.settle(self):
            self._consumer.bus.give_back(self._consumer.queue, self._entry)


class MemoryConsumer:
    """Takes at most ``prefetch`` messages at a time out of one queue."""

    def __init__(self, bus: MemoryBus, queue: str, prefetch: int) -> None:
        self.bus = bus
        self.queue = queue
        self._prefetch = prefetch
        self._held: list[MemoryDelivery] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.bus.register(self.queue, self, present=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.bus.register(self.queue, self, present=False)
        for delivery in list(self._held):
            await delivery.hand_back()

    async def get(self) -> MemoryDelivery:
        """Wait for a message while fewer than ``prefetch`` are in hand."""
        while True:
            self._event.clear()
            delivery = self._take()
            if delivery is not None:
                return delivery
            await self._event.wait()

    def _take(self) -> MemoryDelivery | None:
        while len(self._held) < self._prefetch:
            entry = self.bus.take(self.queue)
            if entry is None:
                return None
            try:
                message = decode(entry.body)
            except msgspec.DecodeError as error:
                entry.rejections += 1
                self.bus.bury(self.queue, entry, f"cannot be read: {error}")
                continue
            delivery = MemoryDelivery(self, entry, message)
            self._held.append(delivery)
            return delivery
        return None

    def holds(self, delivery: MemoryDelivery) -> bool:
        """Whether a delivery is not settled yet."""
        return delivery in self._held

    def settle(self, delivery: MemoryDelivery) -> bool:
        """Let go of a delivery; False where it was settled before."""
        if delivery not in self._held:
            return False
        self._held.remove(delivery)
        self.wake()
        return True

    def wake(self) -> None:
        """Look again; called from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the consumer's loop was closed without closing the consumer
                self._loop.call_soon_threadsafe(self._event.set)
