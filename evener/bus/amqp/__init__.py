"""The bus on RabbitMQ 3.10 or newer."""

import logging

from evener.bus.amqp.bus import AmqpBus

__all__ = ["AmqpBus"]

# aiormq prints a line and a traceback for every lost or refused connection; the bus says the same once, with the queue.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)
