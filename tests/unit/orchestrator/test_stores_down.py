"""While a store is down an event is held and tried again; any other failure of it is the event's own."""

import asyncio
from urllib.parse import urlsplit

import pytest
from redis.exceptions import ConnectionError as RedisGone
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from evener.messages import GroupClosed
from evener_orchestrator import consumer
from evener_orchestrator.ledger import Ledger, engine
from evener_orchestrator.ledger.faults import is_down
from tests.relay import Relay

EVENT = GroupClosed(group_id="g", epoch=1, disposition="skipped")


class Delivered:
    """How a delivery was settled."""

    def __init__(self):
        self.message = EVENT
        self.settled = []

    async def ack(self):
        self.settled.append("ack")

    async def reject(self, reason):
        self.settled.append(reason)

    async def hand_back(self):
        self.settled.append("hand back")


class ReadOnly(Exception):
    sqlstate = "25006"


class Full(Exception):
    sqlstate = "53300"


async def settled(monkeypatch, failures):
    """How an event is settled whose first tries fail."""

    async def apply(_context, _message):
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(consumer, "apply", apply)
    monkeypatch.setattr(consumer, "PAUSE_S", 0.001)
    delivery = Delivered()
    await consumer.settle(None, delivery)
    return delivery.settled


async def test_an_event_outlasts_a_store_that_is_down(monkeypatch):
    """It never goes back to the queue meanwhile: RabbitMQ 3.10 counts that, and gives a message up after a hundred times."""
    down = [OperationalError("x", {}, Exception("no connection")), RedisGone("refused"), ConnectionRefusedError(111, "refused")]
    assert await settled(monkeypatch, down * 50) == ["ack"]


async def test_a_failure_of_the_event_itself_is_told(monkeypatch):
    assert await settled(monkeypatch, [ValueError("bad")]) == ["ValueError: bad"]


async def test_a_database_that_falls_silent_is_noticed(fresh_database_url, monkeypatch):
    """The other end of the connection is gone without a word; the next statement would be waited for until TCP gives up."""
    monkeypatch.setattr(engine, "COMMAND_S", 1.0)
    monkeypatch.setattr(engine, "CONNECT_S", 1.0)
    port = urlsplit(fresh_database_url).port
    async with asyncio.timeout(60), Relay(port) as relay:
        ledger = Ledger(fresh_database_url.replace(f":{port}/", f":{relay.port}/"))

        async def fall_silent(tx):
            relay.stall()
            await tx.session.execute(text("SELECT 1"))

        with pytest.raises(Exception) as caught:
            await ledger.write(fall_silent)
        assert is_down(caught.value)
        relay.cut()
        assert await ledger.write(lambda tx: tx.session.scalar(text("SELECT 7"))) == 7
        await ledger.close()


@pytest.mark.parametrize("fault", [ReadOnly(), Full()])
def test_a_database_that_takes_nothing_is_down(fault):
    wrapped = OperationalError("x", {}, fault)
    assert is_down(wrapped)
    assert is_down(fault)
