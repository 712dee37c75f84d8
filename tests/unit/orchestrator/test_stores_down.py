"""While a store is down an event is held and tried again; any other failure of it is the event's own."""

import asyncio
from urllib.parse import urlsplit

import asyncpg
import pytest
from aiohttp import ClientSession
from redis.exceptions import ConnectionError as RedisGone
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from evener.ids import new_id, session_id
from evener.messages import ROLLOUTS, GroupClosed
from evener_orchestrator import consumer
from evener_orchestrator.ledger import Ledger, engine
from evener_orchestrator.ledger.faults import FAULTS, is_down
from evener_orchestrator.silence import Silence
from tests.relay import Relay
from tests.unit.orchestrator.world import TOKEN, World, finished, run_file

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
    sqlstate = "53100"


class DiskError(Exception):
    sqlstate = "58030"


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
    down.append(PoolTimeout("every connection waits for a database that fell silent"))
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


@pytest.mark.parametrize("fault", [ReadOnly(), Full(), DiskError()])
def test_a_database_that_takes_nothing_is_down(fault):
    assert is_down(fault)
    assert is_down(DBAPIError("x", {}, fault))


async def test_a_database_without_a_free_connection_is_down(fresh_database_url):
    role = f"narrow_{new_id().replace('-', '')}"
    await administer(fresh_database_url, f"CREATE ROLE {role} LOGIN PASSWORD 'narrow' CONNECTION LIMIT 0")
    try:
        ledger = Ledger(
            make_url(fresh_database_url).set(username=role, password="narrow").render_as_string(hide_password=False)
        )
        with pytest.raises(FAULTS) as caught:
            await ledger.write(lambda tx: tx.session.scalar(text("SELECT 1")))
        assert "53300" in (
            getattr(caught.value, "sqlstate", None),
            getattr(getattr(caught.value, "orig", None), "sqlstate", None),
        )
        assert is_down(caught.value)
        await ledger.close()
    finally:
        await administer(fresh_database_url, f"DROP ROLE {role}")


async def test_while_postgres_is_read_only_events_wait_and_the_api_says_503(tmp_path, fresh_database_url):
    world = World(tmp_path, lease_s=600.0, database=fresh_database_url)
    await world.start()
    await world.submit(run_file(rollouts={"group_size": 2, "concurrent": 1}))
    async with asyncio.timeout(20), world.bus.consume(ROLLOUTS) as commands:
        delivery = await commands.get()
        await delivery.ack()
    command = delivery.message
    session = session_id(command.rollout_id, command.attempt)
    lease = await world.api.claim_rollout(session, runner="r")

    await read_only(fresh_database_url, "on")
    beat = f"{world.settings.api}/v1/attempts/{session}/heartbeat"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with ClientSession(headers=headers) as http, http.post(beat, json={"lease": lease.lease}) as answer:
        assert (answer.status, "ask again" in (await answer.json())["detail"]) == (503, True)
    with pytest.raises(FAULTS):
        await Silence(world.context.ledger, lease_s=600.0).end_attempts()
    await world.bus.publish(finished(world, lease))
    await asyncio.sleep(6 * consumer.PAUSE_S)  # rejected, it would be a dead letter by now
    assert (await world.api.get(f"/v1/rollouts/{lease.rollout_id}"))["state"] == "running"

    await read_only(fresh_database_url, "off")
    async with asyncio.timeout(30):
        while (await world.api.get(f"/v1/rollouts/{lease.rollout_id}"))["state"] != "archived":
            await asyncio.sleep(0.1)
    assert await world.bus.dead_letters() == []
    await world.close()


async def read_only(url, value):
    """Let every connection to the database, those that there are as well, read only, or write again."""
    name = urlsplit(url).path.removeprefix("/")
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    await administer(
        url,
        "SET default_transaction_read_only = off",
        f"ALTER DATABASE {name} SET default_transaction_read_only = {value}",
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}",
    )


async def administer(url, *statements):
    connection = await asyncpg.connect(url.replace("+asyncpg", ""), timeout=10)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()
