"""What every bus keeps: a published message is delivered at least once until somebody acknowledges it, or it is a dead letter.

`Bus.publish` returns when the broker has taken the message; a message without a queue is an error, never dropped. A
consumer holds at most ``prefetch`` messages; closing it hands back those it has not settled, without counting against them.
"""

from typing import Protocol, Self

import msgspec

from evener.messages import Message

DELIVERY_LIMIT = 5
"""Rejections after which a message becomes a dead letter; more often than a transient fault of ours repeats."""


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that was rejected `DELIVERY_LIMIT` times or could not be read, and the last reason."""

    queue: str
    body: bytes
    reason: str


class Delivery(Protocol):
    """One message in a consumer's hands; settle it exactly once."""

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
        """It failed: deliver it again, or make it a dead letter at the limit."""
        ...

    async def hand_back(self) -> None:
        """Not tried (a shutdown): deliver it again, uncounted."""
        ...


class Consumer(Protocol):
    """A stream of deliveries from one queue; use it as an async context manager."""

    async def get(self) -> Delivery:
        """Wait for the next delivery."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class Bus(Protocol):
    """A connection to the broker."""

    async def publish(self, message: Message, *, priority: int = 0) -> None:
        """Put a message into its queue and wait until the broker has it. ``priority`` 0 to 9, greater goes first."""
        ...

    def consume(self, queue: str, *, prefetch: int = 1) -> Consumer:
        """A consumer of ``queue``; the queue is made where it is absent."""
        ...

    async def depth(self, queue: str) -> int:
        """How many messages wait in ``queue`` (those in a consumer's hands are not counted)."""
        ...

    async def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, oldest first."""
        ...

    async def close(self) -> None:
        """Hand back what is held and leave."""
        ...
