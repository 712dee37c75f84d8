"""A queue that serves nobody, while the broker serves another one of its kind, is deleted, and made anew by its next user.

RabbitMQ notes on its disk who leads a new quorum queue half a second after it said that it has it. Where it is killed in
between, it comes back with a queue that has no leader for good (rabbitmq-server#15725): what is published to it, and whoever
consumes it, waits for ever. What it held is lost with it, which costs no more than the loss of any message: the ledger issues
commands again until they have their effect, and workers say again what was not heard. Called by the consumers of a bus.
"""

import time

from evener import log
from evener.bus.amqp.link import Link, Lost, Refused, farewell, guard
from evener.bus.amqp.probe import TAKE_S, is_served, serves
from evener.bus.amqp.topology import Topology
from evener.ids import new_id

SILENT_S = 30.0
"""For how long no consumer of a queue is accepted before it is looked at: a new leader is elected within seconds."""

DELETE_S = 30.0
"""Longest wait for the deletion, for which RabbitMQ first asks the members of the queue, of which none answers."""

PROBE = {"x-queue-type": "quorum", "x-expires": 60_000}

_log = log.get("bus")


class Mender:
    """What a bus knows of queues that do not answer; lives as long as the bus, while consumers come and go."""

    def __init__(self, link: Link, topology: Topology) -> None:
        self._link = link
        self._topology = topology
        self._silent: dict[str, float] = {}

    def answered(self, queue: str) -> None:
        """A consumer of ``queue`` was accepted."""
        self._silent.pop(queue, None)

    async def refused(self, queue: str) -> None:
        """A consumer of ``queue`` was not accepted: delete the queue where it has been so for long. Raises Lost."""
        since = self._silent.setdefault(queue, time.monotonic())
        if time.monotonic() - since < SILENT_S:
            return
        try:
            if await serves(self._link, queue) or not await self._serves_another():
                return  # it is the broker that is slow, or another process was here first
            _log.error("queue without a leader", queue=queue, broker=self._link.place, remedy="deleted, and made anew")
            await self._delete(queue)
        except Refused as error:
            _log.error("queue without a leader", queue=queue, broker=self._link.place, error=str(error))
            return
        self._topology.forget()
        self.answered(queue)

    async def _serves_another(self) -> bool:
        """Whether the broker makes a quorum queue and serves it: then it is neither its disk nor its cluster that is slow."""
        channel = await self._link.channel(confirms=False)
        try:
            probe = await guard(channel.declare_queue(f"evener.probe.{new_id()}", durable=True, arguments={**PROBE}), TAKE_S)
            served = await is_served(probe)
            await guard(channel.queue_delete(probe.name), TAKE_S)
        except Lost:
            return False
        finally:
            await farewell(channel.close())
        return served

    async def _delete(self, queue: str) -> None:
        channel = await self._link.channel(confirms=False)
        try:
            await guard(channel.queue_delete(queue), DELETE_S)
        finally:
            await farewell(channel.close())
