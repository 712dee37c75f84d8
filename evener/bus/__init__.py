"""The message bus: one port, and two back ends behind it: this process, and RabbitMQ."""

from evener.bus.memory import MemoryBus
from evener.bus.patience import publish_patiently
from evener.bus.port import DELIVERY_LIMIT, PATIENCE_S, Bus, Consumer, DeadLetter, Delivery
from evener.errors import InputError

__all__ = ["DELIVERY_LIMIT", "Bus", "Consumer", "DeadLetter", "Delivery", "MemoryBus", "connect", "publish_patiently"]


def connect(url: str | None, *, patience_s: float = PATIENCE_S) -> Bus:
    """The bus at an ``amqp://`` or ``amqps://`` URL, or one in this process where there is none.

    Its calls outlast a broker that is away for ``patience_s``.
    It connects when it is first used, and belongs to the event loop that does so. Raises InputError for another scheme.
    """
    if url is None:
        return MemoryBus()
    if not url.startswith(("amqp://", "amqps://")):
        raise InputError("settings_invalid", "EVENER_AMQP_URL: must begin with amqp:// or amqps://")
    from evener.bus.amqp import AmqpBus  # the embedded stack does not need aio-pika

    return AmqpBus(url, patience_s=patience_s)
