"""`evener dead` on a real broker: what a person sees, that no secret is among it, and that a retry happens once."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import pytest
from typer.testing import CliRunner, Result

from evener.bus import DELIVERY_LIMIT, connect, port
from evener.bus.amqp import AmqpBus
from evener.cli import output
from evener.cli.main import app
from evener.errors import InputError, Outcome
from evener.messages import DEAD, EVENTS, ROLLOUTS, RolloutFinished, RunRollout
from tests.relay import Relay

WAIT_S = 20.0
LEASE = "a-lease-nobody-may-see"


@pytest.fixture
async def bus(fresh_amqp_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AmqpBus]:
    monkeypatch.setenv("EVENER_AMQP_URL", fresh_amqp_url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(port, "RETRY_PAUSE_S", 0.001)
    bus = connect(fresh_amqp_url)
    assert isinstance(bus, AmqpBus)
    yield bus
    await asyncio.wait_for(bus.close(), WAIT_S)


async def call(*arguments: str) -> Result:
    """Run the command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["dead", *arguments])


async def document(*arguments: str) -> Any:
    result = await call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def fail(bus: AmqpBus, queue: str, reason: str) -> None:
    """Reject the next message of a queue until it is a dead letter."""
    async with asyncio.timeout(WAIT_S), bus.consume(queue) as consumer:
        for _ in range(DELIVERY_LIMIT):
            await (await consumer.get()).reject(reason)


async def bury_two(bus: AmqpBus) -> None:
    await bus.publish(RolloutFinished(rollout_id="r1", attempt=2, lease=LEASE, outcome=Outcome.FINISHED))
    await fail(bus, EVENTS, f"DataError: [parameters: ('r1', '{LEASE}')]")
    await bus.publish(RunRollout(run_id="run", rollout_id="r2", attempt=1), priority=4)
    await fail(bus, ROLLOUTS, "no slot")


async def test_ls_says_queue_kind_age_and_reason(bus: AmqpBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "_width", 200)  # an id is not folded
    assert await document("ls") == []
    await bury_two(bus)
    first, second = await document("ls")
    assert (first["queue"], first["kind"], first["deaths"]) == (EVENTS, "RolloutFinished", DELIVERY_LIMIT)
    assert first["reason"] == "DataError: [parameters: ('r1', '***')]"
    assert (second["queue"], second["kind"], second["reason"]) == (ROLLOUTS, "RunRollout", "no slot")
    assert [row["id"] for row in await document("ls", "--queue", ROLLOUTS)] == [second["id"]]
    table = (await call("ls")).stdout
    (line,) = [line for line in table.splitlines() if second["id"] in line]
    assert line.split()[1:3] == [ROLLOUTS, "RunRollout"]
    assert line.split()[4] in ("s", "min")
    assert LEASE not in table


async def test_show_decodes_the_message_without_its_lease(bus: AmqpBus) -> None:
    await bury_two(bus)
    identity = (await document("ls"))[0]["id"]
    shown = await document("show", identity[-8:])
    assert shown["id"] == identity
    assert (shown["message"]["rollout_id"], shown["message"]["lease"]) == ("r1", "***")
    assert shown["headers"]["evener-rejections"] == DELIVERY_LIMIT
    for result in (await call("show", identity), await call("show", identity, "--json")):
        assert result.exit_code == 0
        assert "rollout_id" in result.stdout
        assert LEASE not in result.output


async def test_a_body_that_is_no_message_shows_no_lease_either(bus: AmqpBus, fresh_amqp_url: str) -> None:
    async with bus.consume(EVENTS) as consumer, await aio_pika.connect(fresh_amqp_url, timeout=10) as connection:
        channel = await connection.channel(on_return_raises=True)
        cut, unheard = f'{{"type":"RolloutFinished","lease":"{LEASE}', f'{{"type":"Unheard","a":[{{"lease":"{LEASE}"}}]}}'
        for body in (cut.encode(), unheard.encode(), b"\xff"):
            await channel.default_exchange.publish(aio_pika.Message(body, delivery_mode=2), EVENTS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.get(), 0.5)
    rows = await document("ls")
    assert [(row["kind"], row["deaths"]) for row in rows] == [("unreadable", 1), ("Unheard", 1), ("unreadable", 1)]
    messages = [(await document("show", row["id"]))["message"] for row in rows]
    assert messages == ['{"type":"RolloutFinished","lease":"***', {"type": "Unheard", "a": [{"lease": "***"}]}, "\\xff"]


async def test_retry_puts_one_back_into_its_queue(bus: AmqpBus) -> None:
    await bury_two(bus)
    first, second = await document("ls")
    result = await call("retry", second["id"])
    assert (result.exit_code, result.stdout) == (0, f"{second['id']} is back in {ROLLOUTS}\n")
    assert await bus.depth(ROLLOUTS) == 1
    assert [row["id"] for row in await document("ls")] == [first["id"]]
    again = await call("retry", second["id"])
    assert isinstance(again.exception, InputError)
    assert await bus.depth(ROLLOUTS) == 1


async def test_retry_of_all_of_a_queue_and_of_all(bus: AmqpBus) -> None:
    await bury_two(bus)
    await bus.publish(RunRollout(run_id="run", rollout_id="r3", attempt=1))
    await fail(bus, ROLLOUTS, "no slot")
    assert await document("retry", "--all", "--queue", ROLLOUTS) == {"retried": 2, "queue": ROLLOUTS}
    assert (await bus.depth(ROLLOUTS), await bus.depth(EVENTS), await bus.depth(DEAD)) == (2, 0, 1)
    assert await document("retry", "--all") == {"retried": 1, "queue": None}
    assert (await bus.depth(ROLLOUTS), await bus.depth(EVENTS), await bus.depth(DEAD)) == (2, 1, 0)


async def test_two_people_who_retry_all_send_each_once(bus: AmqpBus, fresh_amqp_url: str) -> None:
    for number in range(30):
        await bus.publish(RunRollout(run_id="run", rollout_id=f"r{number}", attempt=1))
    async with asyncio.timeout(WAIT_S), bus.consume(ROLLOUTS, prefetch=30) as consumer:
        held = [await consumer.get() for _ in range(30)]
        for _ in range(DELIVERY_LIMIT - 1):
            await asyncio.gather(*(delivery.reject("no") for delivery in held))
            held = [await consumer.get() for _ in range(30)]
        await asyncio.gather(*(delivery.reject("no") for delivery in held))
    people = [AmqpBus(fresh_amqp_url) for _ in range(2)]
    retried = sum(await asyncio.gather(*(person.retry() for person in people)))
    await asyncio.gather(*(person.close() for person in people))
    retried += (await document("retry", "--all"))["retried"]  # what one held while the other looked
    assert retried == 30
    assert (await bus.depth(ROLLOUTS), await bus.depth(DEAD)) == (30, 0)


async def test_a_connection_lost_before_the_letter_is_removed_sends_nothing_twice(
    bus: AmqpBus, fresh_amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bury_two(bus)
    parts = urlsplit(fresh_amqp_url)
    async with Relay(parts.port or 5672) as relay:
        netloc = f"{parts.username}:{parts.password}@127.0.0.1:{relay.port}"
        cut = AmqpBus(urlunsplit(parts._replace(netloc=netloc)))
        send = cut._publisher.send
        sends: list[str] = []

        async def send_and_lose(queue: str, *arguments: Any, **options: Any) -> None:
            await send(queue, *arguments, **options)
            sends.append(queue)
            relay.cut()

        monkeypatch.setattr(cut._publisher, "send", send_and_lose)
        assert await cut.retry() == 2
        await cut.close()
    assert sorted(sends) == sorted([EVENTS, ROLLOUTS])
    assert (await bus.depth(ROLLOUTS), await bus.depth(EVENTS), await bus.depth(DEAD)) == (1, 1, 0)


async def test_bad_calls_name_what_is_wrong(bus: AmqpBus) -> None:
    for arguments in (["retry"], ["retry", "some-id", "--all"], ["retry", "some-id", "--queue", ROLLOUTS]):
        assert (await call(*arguments)).exit_code == 2
    await bury_two(bus)
    unknown = await call("show", "no-such-id")
    assert isinstance(unknown.exception, InputError)
    assert "no-such-id" in str(unknown.exception)
    ambiguous = await call("show", "")
    assert "2 have" in str(ambiguous.exception)
    assert (await document("show", "latest"))["queue"] == ROLLOUTS


def test_an_embedded_bus_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENER_AMQP_URL", raising=False)
    for arguments in (["ls"], ["show", "x"], ["retry", "--all"]):
        error = CliRunner().invoke(app, ["dead", *arguments]).exception
        assert isinstance(error, InputError)
        assert "EVENER_AMQP_URL" in str(error)
        assert error.exit_code == 2
