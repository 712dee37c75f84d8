"""The message bus: one port, and a back end in this process."""

from evener.bus.memory import MemoryBus
from evener.bus.port import Bus, Consumer, DeadLetter, Delivery

__all__ = ["Bus", "Consumer", "DeadLetter", "Delivery", "MemoryBus"]
