"""What only a real broker can show: losses of the connection and of the broker, refusals, priorities, policies."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import pytest
from aio_pika.tools import OneShotCallback
from aiormq import Channel

from evener.bus import DeadLetter, connect, publish_patiently
from evener.bus.amqp import AmqpBus
from evener.bus.amqp.link import Link
from evener.bus.amqp.publisher import MAX_BODY, Publisher
from evener.bus.amqp.topology import EXCHANGE, Topology
from evener.errors import InfraError
from evener.messages import DEAD, EVENTS, ROLLOUTS, RunRollout
from tests.ports import free_port
from tests.relay import Relay
from tests.services import Rabbit

WAIT_S = 40.0


def command(number: int) -> RunRollout:
    return RunRollout(run_id="run", rollout_id=f"rollout-{number}", attempt=1)


def with_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{port}"))


async def version(url: str) -> tuple[int, ...]:
    async with await aio_pika.connect(url, timeout=10) as connection:
        assert connection.transport is not None
        text = connection.transport.connection.server_properties["version"]
        return tuple(int(part) for part in str(text).split(".")[:2])


@pytest.fixture
async def bus(fresh_amqp_url: str) -> AsyncIterator[AmqpBus]:
    bus = connect(fresh_amqp_url)
    assert isinstance(bus, AmqpBus)
    yield bus
    await asyncio.wait_for(bus.close(), WAIT_S)


@pytest.fixture
async def relay(fresh_amqp_url: str) -> AsyncIterator[Relay]:
    async with Relay(urlsplit(fresh_amqp_url).port or 5672) as relay:
        yield relay


@pytest.fixture
async def cut_bus(relay: Relay, fresh_amqp_url: str) -> AsyncIterator[AmqpBus]:
    """A bus whose connections a test can cut."""
    bus = AmqpBus(with_port(fresh_amqp_url, relay.port))
    yield bus
    await asyncio.wait_for(bus.close(), WAIT_S)


async def drain(bus: AmqpBus, wanted: set[str]) -> None:
    """Consume until every id was seen and acknowledged."""
    async with asyncio.timeout(WAIT_S), bus.consume(ROLLOUTS, prefetch=10) as consumer:
        while wanted:
            delivery = await consumer.get()
            wanted.discard(getattr(delivery.message, "rollout_id", ""))
            await delivery.ack()


async def test_priority_as_far_as_the_broker_can(bus: AmqpBus, fresh_amqp_url: str) -> None:
    for priority in (0, 3, 9, 5):
        await bus.publish(command(priority), priority=priority)
    seen: list[str] = []
    async with asyncio.timeout(WAIT_S), bus.consume(ROLLOUTS) as consumer:
        for _ in range(4):
            delivery = await consumer.get()
            seen.append(getattr(delivery.message, "rollout_id", "").removeprefix("rollout-"))
            await delivery.ack()
    broker = await version(fresh_amqp_url)
    levels = "9530" if broker >= (4, 3) else "9503" if broker >= (4, 0) else "0395"
    assert "".join(seen) == levels


async def test_cut_connections_lose_no_message(relay: Relay, cut_bus: AmqpBus) -> None:
    wanted = {f"rollout-{number}" for number in range(200)}
    draining = asyncio.create_task(drain(cut_bus, wanted))

    async def publish() -> None:
        for start in range(0, 200, 10):
            await asyncio.gather(*(cut_bus.publish(command(start + offset)) for offset in range(10)))

    publishing = asyncio.create_task(publish())
    for _ in range(5):
        await asyncio.sleep(0.3)
        relay.cut()
    await asyncio.wait_for(publishing, WAIT_S)
    await draining
    assert not wanted


async def test_a_consumer_resumes_with_a_fresh_tag(relay: Relay, cut_bus: AmqpBus, bus: AmqpBus) -> None:
    async with asyncio.timeout(WAIT_S), cut_bus.consume(ROLLOUTS) as consumer:
        await bus.publish(command(1))
        first = await consumer.get()
        relay.cut()
        again = await consumer.get()
        assert again.message == first.message
        assert again.redelivered
        assert again.tag != first.tag
        await first.ack()  # too late, and harmless
        await again.ack()
        await bus.publish(command(2))
        await (await consumer.get()).ack()
    assert await bus.depth(ROLLOUTS) == 0


async def test_a_consumer_that_the_broker_cancels_subscribes_again(bus: AmqpBus, fresh_amqp_url: str) -> None:
    async with asyncio.timeout(WAIT_S), bus.consume(ROLLOUTS) as consumer:
        waiting = asyncio.create_task(consumer.get())
        await asyncio.sleep(0.1)
        async with await aio_pika.connect(fresh_amqp_url) as connection:
            await (await connection.channel()).queue_delete(ROLLOUTS)
        await asyncio.sleep(0.5)
        await bus.publish(command(1))
        await (await waiting).ack()


async def test_consumers_that_come_and_go_leave_nothing_behind(bus: AmqpBus) -> None:
    """A runner opens one whenever a slot is free; each takes a message, holds another, and settles that too late."""

    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, OneShotCallback | asyncio.Task) for each in gc.get_objects())

    async def come_and_go() -> None:
        await bus.publish(command(0))
        await bus.publish(command(1))
        async with bus.consume(ROLLOUTS, prefetch=2) as consumer:
            taken, held = await consumer.get(), await consumer.get()
            await taken.ack()
        await held.ack()
        async with bus.consume(ROLLOUTS) as consumer:
            again = await consumer.get()
            assert again.message.message_id == held.message.message_id
            await again.ack()
        assert await bus.depth(ROLLOUTS) == 0

    async with asyncio.timeout(WAIT_S):
        await come_and_go()
        before = kept()
        for _ in range(20):
            await come_and_go()
        assert kept() == before


@pytest.mark.parametrize("after_s", [0.0, 0.0005])
async def test_a_subscription_that_is_given_up_amid_deliveries_stops_no_other(
    bus: AmqpBus, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """Its channel reads no more while the broker sends what waits; aiormq then reads nothing more for any channel."""
    await asyncio.gather(*(bus.publish(command(number)) for number in range(60)))
    subscribe = Channel.basic_consume

    async def given_up(channel: Channel, *args: Any, **options: Any) -> Any:
        asyncio.get_running_loop().call_later(after_s, subscribing.cancel)
        return await subscribe(channel, *args, **options)

    async with bus.consume(EVENTS):
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "basic_consume", given_up)
            first = bus.consume(ROLLOUTS, prefetch=16)
            subscribing = asyncio.create_task(first.__aenter__())
            await asyncio.wait({subscribing})
        if not subscribing.cancelled():  # it was answered before
            await first.__aexit__()
        async with asyncio.timeout(10), bus.consume(ROLLOUTS, prefetch=16) as consumer:
            for _ in range(60):
                await (await consumer.get()).ack()


async def test_a_wiped_broker_is_declared_again_by_the_publisher(bus: AmqpBus, fresh_amqp_url: str) -> None:
    await bus.publish(command(1))
    async with await aio_pika.connect(fresh_amqp_url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(ROLLOUTS)
        await bus.publish(command(2))
        await channel.queue_delete(ROLLOUTS)
        await channel.exchange_delete(EXCHANGE)
    await bus.publish(command(3))
    assert await bus.depth(ROLLOUTS) == 1


async def test_an_unroutable_message_is_an_error(fresh_amqp_url: str) -> None:
    class Forgetful(Topology):
        async def ensure(self, link: Link, queue: str) -> None:
            await super().ensure(link, DEAD)

    link = Link(fresh_amqp_url, "test")
    with pytest.raises(InfraError, match=r"publishing to rollouts\.run .*no queue takes it") as raised:
        await Publisher(link, Forgetful(), 0.3).send(ROLLOUTS, b"{}", priority=0)
    assert raised.value.cause == "bus_refused"
    await link.close()


async def test_a_broker_that_is_down_is_an_error_of_publish(fresh_amqp_url: str) -> None:
    bus = AmqpBus(with_port(fresh_amqp_url, free_port()), patience_s=0.5)
    with pytest.raises(InfraError) as raised:
        await asyncio.wait_for(bus.publish(command(1)), 5)
    assert raised.value.cause == "bus_unavailable"
    assert "evener:evener" not in str(raised.value)
    await bus.close()


async def test_wrong_credentials_are_refused_at_once(fresh_amqp_url: str) -> None:
    parts = urlsplit(fresh_amqp_url)
    bus = AmqpBus(urlunsplit(parts._replace(netloc=f"nobody:wrong@{parts.hostname}:{parts.port}")))
    started = time.monotonic()
    with pytest.raises(InfraError) as published:
        await bus.publish(command(1))
    with pytest.raises(InfraError) as consumed:
        async with bus.consume(ROLLOUTS):
            pass
    assert published.value.cause == consumed.value.cause == "bus_refused"
    assert time.monotonic() - started < 10
    assert "wrong" not in str(published.value)
    await bus.close()


async def test_a_queue_of_another_kind_is_refused_at_once(bus: AmqpBus, fresh_amqp_url: str) -> None:
    async with await aio_pika.connect(fresh_amqp_url) as connection:
        await (await connection.channel()).declare_queue(ROLLOUTS, durable=True, arguments={"x-queue-type": "classic"})
    with pytest.raises(InfraError, match=r"rollouts\.run") as raised:
        await asyncio.wait_for(bus.publish(command(1)), 5)
    assert raised.value.cause == "bus_refused"
    with pytest.raises(InfraError, match=r"rollouts\.run"):
        async with bus.consume(ROLLOUTS):
            pass


async def test_a_giant_message_is_refused_before_it_closes_the_channel(bus: AmqpBus) -> None:
    giant = RunRollout(run_id="x" * MAX_BODY, rollout_id="r", attempt=1)
    with pytest.raises(InfraError, match="bytes"):
        await bus.publish(giant)
    await bus.publish(command(1))


async def test_closing_is_quick_though_the_broker_is_silent(relay: Relay, cut_bus: AmqpBus) -> None:
    await cut_bus.publish(command(1))
    async with cut_bus.consume(ROLLOUTS) as consumer:
        await asyncio.wait_for(consumer.get(), WAIT_S)
        relay.stall()
        started = time.monotonic()
        await cut_bus.close()
        assert time.monotonic() - started < 8  # the driver's own patience with a silent broker is longer
    assert time.monotonic() - started < 16
    with pytest.raises(InfraError, match="closed"):
        await cut_bus.publish(command(2))


async def test_a_get_ends_when_the_bus_closes(bus: AmqpBus) -> None:
    async with bus.consume(ROLLOUTS) as consumer:
        waiting = asyncio.create_task(consumer.get())
        await asyncio.sleep(0.1)
        await bus.close()
        with pytest.raises(InfraError, match="closed"):
            await asyncio.wait_for(waiting, 5)


async def test_what_a_broken_consumer_never_settles_is_a_dead_letter_of_the_broker(
    bus: AmqpBus, rabbitmq: Rabbit, fresh_amqp_url: str
) -> None:
    if not rabbitmq.restartable:
        pytest.skip("the policies of compose/ may not be loaded on a broker that is not ours")
    await bus.publish(command(1))
    async with await aio_pika.connect(fresh_amqp_url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(ROLLOUTS, ensure=False)
        letters: list[DeadLetter] = []
        async with asyncio.timeout(WAIT_S):
            while not letters:
                raw = await queue.get(fail=False)
                if raw is not None:
                    await raw.reject(requeue=True)
                elif await bus.depth(ROLLOUTS) == 0:
                    letters = await bus.dead_letters()
    assert [(letter.queue, letter.reason) for letter in letters] == [(ROLLOUTS, "given up by RabbitMQ: delivery_limit")]
    assert letters[0].deaths == 1
    assert letters[0].died is not None
    assert await bus.retry(letters[0].id, queue=ROLLOUTS) == 1
    assert await bus.depth(ROLLOUTS) == 1


async def test_a_restart_of_the_broker_loses_no_message(rabbitmq: Rabbit, bus: AmqpBus) -> None:
    if not rabbitmq.restartable:
        pytest.skip("the broker is not ours to restart")
    wanted = {f"rollout-{number}" for number in range(150)}
    for number in range(50):
        await bus.publish(command(number))
    async with asyncio.timeout(4 * WAIT_S), bus.consume(ROLLOUTS) as consumer:
        held = await consumer.get()
        publishing = [asyncio.create_task(publish_all(bus, range(50, 100)))]
        await asyncio.to_thread(rabbitmq.stop)
        publishing.append(asyncio.create_task(publish_all(bus, range(100, 150))))
        await asyncio.to_thread(rabbitmq.start)
        await asyncio.gather(*publishing)
        await held.ack()  # too late: it is among what drains
    await drain(bus, wanted)
    assert not wanted


async def test_under_an_alarm_publications_wait_and_everything_else_goes_on(rabbitmq: Rabbit, bus: AmqpBus) -> None:
    if not rabbitmq.restartable:
        pytest.skip("the broker is not ours to alarm")
    await bus.publish(command(1))
    await bus.publish(command(2))
    alarm = "{resource_limit, memory, node()}"
    async with asyncio.timeout(4 * WAIT_S), bus.consume(ROLLOUTS) as consumer:
        held = await consumer.get()
        await asyncio.to_thread(rabbitmq.evaluate, f"rabbit_alarm:set_alarm({{{alarm}, []}}).")
        try:
            waiting = [asyncio.create_task(publish_patiently(bus, command(3)))]
            await asyncio.sleep(1.0)  # the first may still be taken: it is what makes the broker stop reading
            waiting.append(asyncio.create_task(publish_patiently(bus, command(4))))
            await held.ack()
            held = await consumer.get()  # what is settled and delivered goes by another connection
            assert getattr(held.message, "rollout_id", "") == "rollout-2"
            await asyncio.sleep(2.0)
            assert not waiting[1].done()
        finally:
            await asyncio.to_thread(rabbitmq.evaluate, f"rabbit_alarm:clear_alarm({alarm}).")
        await asyncio.gather(*waiting)
        await held.ack()
    await drain(bus, {"rollout-3", "rollout-4"})


async def test_what_is_held_for_longer_than_the_broker_waits_is_delivered_again(rabbitmq: Rabbit, bus: AmqpBus) -> None:
    if not rabbitmq.restartable:
        pytest.skip("the broker's deadlines are not ours to set")
    deadlines = "[application:set_env(rabbit, K, V) || {{K, V}} <- [{{consumer_timeout, {}}}, {{channel_tick_interval, {}}}]]."
    await asyncio.to_thread(rabbitmq.evaluate, deadlines.format(1000, 500))
    try:
        await bus.publish(command(1))
        async with asyncio.timeout(2 * WAIT_S), bus.consume(ROLLOUTS) as consumer:
            held = await consumer.get()
            again = await consumer.get()  # with a prefetch of one: the broker has taken the first back
            assert (again.message, again.redelivered) == (held.message, True)
            assert again.tag != held.tag
            await held.ack()  # too late, and harmless
            await again.ack()
            await bus.publish(command(2))
            await (await consumer.get()).ack()
    finally:
        await asyncio.to_thread(rabbitmq.evaluate, deadlines.format(1_800_000, 60_000))
    assert await bus.depth(ROLLOUTS) == 0


async def publish_all(bus: AmqpBus, numbers: range) -> None:
    """Publish as an outbox does: each until it is confirmed."""

    async def one(number: int) -> None:
        while True:
            try:
                return await bus.publish(command(number))
            except InfraError:
                await asyncio.sleep(0.1)

    await asyncio.gather(*map(one, numbers))
