"""The embedded bus: queues in this process, safe to publish to and consume from on any thread's event loop.

It forgets everything with the process; the ledger issues again whatever has no effect at the next start.
"""

import asyncio
import heapq
import threading
from dataclasses import dataclass, field
from typing import Self

from evener.bus.port import DELIVERY_LIMIT, DeadLetter
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
        self._dead: list[DeadLetter] = []
        self._number = 0

    async def publish(self, message: Message, *, priority: int = 0) -> None:
        """Queue a message; it is encoded here, so that what a consumer sees is what a broker would have carried."""
        with self._lock:
            self._number += 1
            self._push(queue_of(message), _Entry((-priority, self._number), encode(message)))

    def consume(self, queue: str, *, prefetch: int = 1) -> "MemoryConsumer":
        """A consumer of ``queue``."""
        return MemoryConsumer(self, queue, prefetch)

    async def depth(self, queue: str) -> int:
        """How many messages wait."""
        with self._lock:
            return len(self._queue(queue).entries)

    async def dead_letters(self) -> list[DeadLetter]:
        """The dead letters."""
        with self._lock:
            return list(self._dead)

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

    def give_back(self, name: str, entry: _Entry, *, reason: str | None) -> None:
        """Queue an entry again at its old place; with a reason it counts as rejected."""
        entry.redelivered = True
        with self._lock:
            if reason is not None:
                entry.rejections += 1
                if entry.rejections >= DELIVERY_LIMIT:
                    self._dead.append(DeadLetter(name, entry.body, reason))
                    return
            self._push(name, entry)

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

    def __init__(self, consumer: "MemoryConsumer", entry: _Entry) -> None:
        self._consumer = consumer
        self._entry = entry
        self.message = decode(entry.body)

    @property
    def redelivered(self) -> bool:
        """Whether it was handed out before."""
        return self._entry.redelivered

    async def ack(self) -> None:
        """Forget it."""
        self._consumer.settle(self)

    async def reject(self, reason: str) -> None:
        """Queue it again, or make it a dead letter."""
        if self._consumer.settle(self):
            self._consumer.bus.give_back(self._consumer.queue, self._entry, reason=reason)

    async def hand_back(self) -> None:
        """Queue it again, uncounted."""
        if self._consumer.settle(self):
            self._consumer.bus.give_back(self._consumer.queue, self._entry, reason=None)


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
            if len(self._held) < self._prefetch:
                entry = self.bus.take(self.queue)
                if entry is not None:
                    delivery = MemoryDelivery(self, entry)
                    self._held.append(delivery)
                    return delivery
            await self._event.wait()

    def settle(self, delivery: MemoryDelivery) -> bool:
        """Let go of a delivery; False where it was settled before."""
        if delivery not in self._held:
            return False
        self._held.remove(delivery)
        self.wake()
        return True

    def wake(self) -> None:
        """Look again; called from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._event.set)
