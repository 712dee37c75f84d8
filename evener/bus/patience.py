"""What a worker has done is said, however long the broker is away: work is not done again because RabbitMQ restarts.

`Bus.publish` gives up after its patience, which is right for an outbox that keeps its messages. A worker keeps nothing: it
waits here, and whoever stops it ends the wait. Used by runner, verifier and learner.
"""

import asyncio

from evener import log
from evener.bus.port import Bus
from evener.errors import InfraError
from evener.messages import Message

PAUSE_S = 1.0

_log = log.get("bus")


async def publish_patiently(bus: Bus, message: Message) -> None:
    """Publish ``message`` once a broker takes it. Raises InfraError ``bus_refused`` where one will not, or ours was closed."""
    while True:
        try:
            return await bus.publish(message)
        except InfraError as error:
            if error.cause != "bus_unavailable" or bus.closed:
                raise
            _log.warning("not published, trying again", message=type(message).__name__, error=str(error))
        await asyncio.sleep(PAUSE_S)
