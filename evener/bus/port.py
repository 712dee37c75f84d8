"""What every bus keeps: a published message is delivered at least once until somebody acknowledges it, or it is a dead letter.

`Bus.publish` returns when the broker has taken the message; a message without a queue is an error, never dropped. A
consumer holds at most ``prefetch`` messages; closing it hands back those it has not settled, without counting against them.
Only `Delivery.reject` counts. A message that cannot be read becomes a dead letter at once, and no consumer sees it.
"""

from typing import Any, Protocol, Self

import msgspec

from evener.messages import Message

DELIVERY_LIMIT = 5
"""Rejections after which a message becomes a dead letter; more often than a transient fault of ours repeats."""

PATIENCE_S = 30.0
"""How long a call outlasts a broker that is away; a restart takes 5 to 20 s."""

RETRY_PAUSE_S = 0.05
"""Pause after the first rejection; each further one waits four times as long: 0.05, 0.2, 0.8 and 3.2 s before the limit,
so that a restart of a store (a few seconds) makes no dead letters."""


def retry_pause(rejections: int) -> float:
    """Seconds between rejection 1, 2, ... of a message and its next delivery."""
    return RETRY_PAUSE_S * 4 ** (rejections - 1)


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that was rejected `DELIVERY_LIMIT` times or could not be read: its queue, its body and the last reason.

    ``died`` is in Unix seconds (None: the broker does not say); ``deaths`` how often it was rejected or, where the broker gave
    it up, how often the broker did; ``headers`` are the broker's.
    """

    id: str
    queue: str
    body: bytes
    reason: str
    died: float | None
    deaths: int
    headers: dict[str, Any] = {}


class Delivery(Protocol):
    """One message in a consumer's hands; settle it exactly once.

    Settling may come too late, when the broker was lost in between: it then changes nothing, and the message is delivered
    again.
    """

    @property
    def message(self) -> Message:
        """The message."""
        ...

    @property
    def redelivered(self) -> bool:
        """Whether it may have been delivered before."""
        ...

    async def ack(self) -> None:
        """It is done: forget it."""
        ...

    async def reject(self, reason: str) -> None:
        """It failed: deliver it again after `retry_pause`, or make it a dead letter at the limit.

        Waits out the pause, during which the message counts toward ``prefetch``: a consumer that only fails slows down.
        """
        ...

    async def hand_back(self) -> None:
        """Not tried (a shutdown): deliver it again, uncounted."""
        ...


class Consumer(Protocol):
    """A stream of deliveries from one queue; use it as an async context manager, and as often as you like."""

    async def get(self) -> Delivery:
        """Wait for the next delivery, through any loss of the broker; the caller bounds the wait."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class Bus(Protocol):
    """A connection to the broker."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called: nothing will be published any more."""
        ...

    async def publish(self, message: Message, *, priority: int = 0) -> None:
        """Put a message into its queue and wait until the broker has it.

        ``priority`` is 0 to 9, greater goes first, as far as the broker can: RabbitMQ before 4.0 keeps the order of
        arrival, before 4.3 it tells only 0-4 from 5-9. Raises InfraError ``bus_unavailable`` or ``bus_refused``; the
        message may then be delivered all the same.
        """
        ...

    def consume(self, queue: str, *, prefetch: int = 1) -> Consumer:
        """A consumer of ``queue``; the queue is made where it is absent."""
        ...

    async def depth(self, queue: str) -> int:
        """How many messages wait in ``queue`` (those in a consumer's hands are not counted); 0 where it is absent."""
        ...

    async def delete(self, queue: str) -> None:
        """Forget ``queue``, which nobody consumes, with what waits in it; who publishes or consumes later makes it anew.

        RabbitMQ does not tell a consumer whose queue is deleted and made anew at once. An absent queue is no error. Raises
        InfraError.
        """
        ...

    async def dead_letters(self, limit: int | None = 100) -> list[DeadLetter]:
        """At most ``limit`` dead letters (None: all), oldest first. They stay."""
        ...

    async def retry(self, dead_id: str | None = None, *, queue: str | None = None) -> int:
        """Put one dead letter, or all (of ``queue``), back with a clean record. Returns how many were put back."""
        ...

    async def close(self) -> None:
        """Hand back what is held and leave, within 2 s."""
        ...
