"""What every bus keeps, run against the one in this process and against a real RabbitMQ."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aio_pika
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity

from evener.bus import DELIVERY_LIMIT, Bus, MemoryBus, connect, port
from evener.messages import EVENTS, ROLLOUTS, WORKSPACES, GroupClosed, RunRollout, ScoreWorkspace, TrainGroup, train_queue

WAIT_S = 20.0
SHORT_S = 0.4
"""How long "nothing arrives" is watched; a delivery takes 10 ms."""


@dataclass
class Backend:
    """One bus, and a way to put bytes that are no message into a queue of it."""

    name: str
    bus: Bus
    put_raw: Callable[[str, bytes], Awaitable[None]]
    has: Callable[[str], Awaitable[bool]]


@pytest.fixture(params=["memory", "amqp"])
async def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    monkeypatch.setattr(port, "RETRY_PAUSE_S", 0.001)
    if request.param == "memory":
        memory = MemoryBus()

        async def put_memory(queue: str, body: bytes) -> None:
            memory.put(queue, body)

        async def memory_has(queue: str) -> bool:
            return queue in memory._queues

        yield Backend("memory", memory, put_memory, memory_has)
        return
    url: str = request.getfixturevalue("fresh_amqp_url")

    async def put_amqp(queue: str, body: bytes) -> None:
        async with await aio_pika.connect(url, timeout=10) as connection:
            channel = await connection.channel(on_return_raises=True)
            await channel.default_exchange.publish(aio_pika.Message(body, delivery_mode=2, priority=0), queue)

    async def amqp_has(queue: str) -> bool:
        async with await aio_pika.connect(url, timeout=10) as connection:
            channel = await connection.channel()
            try:
                await channel.declare_queue(queue, passive=True)
            except ChannelNotFoundEntity:
                return False
            return True

    bus = connect(url)
    yield Backend("amqp", bus, put_amqp, amqp_has)
    await asyncio.wait_for(bus.close(), WAIT_S)


@pytest.fixture
def bus(backend: Backend) -> Bus:
    return backend.bus


def command(number: int = 1) -> RunRollout:
    return RunRollout(run_id="run", rollout_id=f"rollout-{number}", attempt=1)


async def take(consumer: port.Consumer) -> port.Delivery:
    async with asyncio.timeout(WAIT_S):
        return await consumer.get()


async def take_nothing(consumer: port.Consumer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SHORT_S):
            await consumer.get()


async def until_depth(bus: Bus, queue: str, depth: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await bus.depth(queue) != depth:
            await asyncio.sleep(0.02)


async def test_a_message_arrives_as_it_was_sent(bus: Bus) -> None:
    sent = GroupClosed(group_id="g", epoch=3, disposition="rejected", reason="ä", traceparent="00-aa-bb-01")
    await bus.publish(sent)
    async with bus.consume(EVENTS) as consumer:
        delivery = await take(consumer)
        assert delivery.message == sent
        assert not delivery.redelivered
        await delivery.ack()


async def test_each_kind_goes_to_its_queue(bus: Bus) -> None:
    sent = {
        ROLLOUTS: command(),
        WORKSPACES: ScoreWorkspace(run_id="run", rollout_id="r", attempt=2),
        train_queue("tiny"): TrainGroup(run_id="run", policy="tiny", group_id="g"),
    }
    for message in sent.values():
        await bus.publish(message)
    for queue, message in sent.items():
        async with bus.consume(queue) as consumer:
            delivery = await take(consumer)
            assert delivery.message == message
            await delivery.ack()


async def test_acknowledged_is_forgotten(bus: Bus) -> None:
    await bus.publish(command())
    async with bus.consume(ROLLOUTS) as consumer:
        await (await take(consumer)).ack()
    async with bus.consume(ROLLOUTS) as consumer:
        await take_nothing(consumer)
    assert await bus.depth(ROLLOUTS) == 0


async def test_unsettled_comes_back_when_its_consumer_closes(bus: Bus) -> None:
    sent = command()
    await bus.publish(sent)
    async with bus.consume(ROLLOUTS) as consumer:
        assert not (await take(consumer)).redelivered
    async with bus.consume(ROLLOUTS) as consumer:
        again = await take(consumer)
        assert again.message == sent
        assert again.redelivered
        await again.ack()


async def test_a_message_that_arrives_while_a_consumer_waits(bus: Bus) -> None:
    async with bus.consume(ROLLOUTS) as consumer:
        waiting = asyncio.create_task(take(consumer))
        await asyncio.sleep(0.05)
        await bus.publish(command())
        await (await waiting).ack()


async def test_rejected_comes_back_and_at_the_limit_is_a_dead_letter_with_its_reason(bus: Bus) -> None:
    sent = command()
    await bus.publish(sent)
    async with bus.consume(ROLLOUTS) as consumer:
        for number in range(1, DELIVERY_LIMIT + 1):
            assert await bus.dead_letters() == []
            delivery = await take(consumer)
            assert delivery.message == sent
            assert delivery.redelivered == (number > 1)
            await delivery.reject(f"failure {number}")
        await take_nothing(consumer)
    (letter,) = await bus.dead_letters()
    assert (letter.queue, letter.reason, letter.deaths) == (ROLLOUTS, f"failure {DELIVERY_LIMIT}", DELIVERY_LIMIT)
    assert letter.died is not None
    assert abs(time.time() - letter.died) < WAIT_S
    assert sent.message_id.encode() in letter.body
    assert await bus.depth(ROLLOUTS) == 0


async def test_handing_back_and_closing_are_not_counted(bus: Bus) -> None:
    await bus.publish(command())
    for _ in range(DELIVERY_LIMIT):
        async with bus.consume(ROLLOUTS) as consumer:
            await (await take(consumer)).hand_back()
        async with bus.consume(ROLLOUTS) as consumer:
            await take(consumer)
    async with bus.consume(ROLLOUTS) as consumer:
        for number in range(DELIVERY_LIMIT - 1):
            await (await take(consumer)).reject(f"failure {number}")
        await (await take(consumer)).ack()
    assert await bus.dead_letters() == []


async def test_the_pause_before_a_retry_grows(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "RETRY_PAUSE_S", 0.05)
    await bus.publish(command())
    loop = asyncio.get_running_loop()
    async with bus.consume(ROLLOUTS) as consumer:
        for least in (0.05, 0.2):
            started = loop.time()
            await (await take(consumer)).reject("failure")
            await (await take(consumer)).hand_back()
            assert loop.time() - started >= least


async def test_closing_during_the_pause_hands_back_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "RETRY_PAUSE_S", 0.3)
    await bus.publish(command())
    async with bus.consume(ROLLOUTS) as consumer:
        rejecting = asyncio.create_task((await take(consumer)).reject("failure"))
        await asyncio.sleep(0.05)
    await asyncio.wait_for(rejecting, WAIT_S)
    await until_depth(bus, ROLLOUTS, 1)


async def test_settling_twice_changes_nothing(bus: Bus) -> None:
    await bus.publish(command(1))
    await bus.publish(command(2))
    async with bus.consume(ROLLOUTS) as consumer:
        delivery = await take(consumer)
        await delivery.ack()
        await delivery.ack()
        await delivery.hand_back()
        await delivery.reject("late")
        second = await take(consumer)
        assert second.message != delivery.message
        await second.ack()
        await take_nothing(consumer)


async def test_settling_after_the_consumer_closed_changes_nothing(bus: Bus) -> None:
    await bus.publish(command())
    async with bus.consume(ROLLOUTS) as consumer:
        late = await take(consumer)
    await late.ack()
    async with bus.consume(ROLLOUTS) as consumer:
        await (await take(consumer)).ack()


async def test_a_consumer_holds_at_most_its_prefetch(bus: Bus) -> None:
    for number in range(5):
        await bus.publish(command(number))
    async with bus.consume(ROLLOUTS, prefetch=2) as consumer:
        first = await take(consumer)
        await take(consumer)
        await take_nothing(consumer)
        await first.ack()
        await take(consumer)
        await take_nothing(consumer)
        async with bus.consume(ROLLOUTS, prefetch=2) as other:
            for _ in range(2):
                await (await take(other)).ack()
    await until_depth(bus, ROLLOUTS, 2)


async def test_two_consumers_share_a_queue(bus: Bus) -> None:
    for number in range(20):
        await bus.publish(command(number))
    seen: list[str] = []

    async def work(consumer: port.Consumer) -> None:
        while len(seen) < 20:
            delivery = await consumer.get()
            seen.append(getattr(delivery.message, "rollout_id", ""))
            await delivery.ack()

    async with bus.consume(ROLLOUTS) as left, bus.consume(ROLLOUTS, prefetch=4) as right:
        tasks = [asyncio.create_task(work(consumer)) for consumer in (left, right, right)]
        done, pending = await asyncio.wait(tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert done
    assert sorted(seen) == sorted(f"rollout-{number}" for number in range(20))


async def test_a_cancelled_get_loses_nothing(bus: Bus) -> None:
    async with bus.consume(ROLLOUTS, prefetch=3) as consumer:
        for _ in range(3):
            waiting = asyncio.create_task(consumer.get())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        for number in range(3):
            await bus.publish(command(number))
        for _ in range(3):
            await (await take(consumer)).ack()


async def test_gathered_publications_all_arrive(bus: Bus) -> None:
    await asyncio.gather(*(bus.publish(command(number)) for number in range(300)))
    await until_depth(bus, ROLLOUTS, 300)
    seen: set[str] = set()
    async with bus.consume(ROLLOUTS, prefetch=50) as consumer:
        for _ in range(300):
            delivery = await take(consumer)
            seen.add(getattr(delivery.message, "rollout_id", ""))
            await delivery.ack()
    assert len(seen) == 300


async def test_what_cannot_be_read_is_a_dead_letter_and_stops_nobody(backend: Backend) -> None:
    bus = backend.bus
    async with bus.consume(ROLLOUTS) as consumer:
        await backend.put_raw(ROLLOUTS, b"\xff no json")
        await backend.put_raw(ROLLOUTS, b'{"type":"Unheard"}')
        await bus.publish(command())
        await (await take(consumer)).ack()
    letters = await bus.dead_letters()
    assert [letter.body for letter in letters] == [b"\xff no json", b'{"type":"Unheard"}']
    assert all(letter.reason.startswith("cannot be read: ") and letter.queue == ROLLOUTS for letter in letters)
    assert [letter.deaths for letter in letters] == [1, 1]


async def test_depth_counts_what_waits(bus: Bus) -> None:
    assert await bus.depth(WORKSPACES) == 0
    for number in range(3):
        await bus.publish(command(number))
    await until_depth(bus, ROLLOUTS, 3)
    async with bus.consume(ROLLOUTS) as consumer:
        await take(consumer)
        await until_depth(bus, ROLLOUTS, 2)
    await until_depth(bus, ROLLOUTS, 3)


async def test_a_deleted_queue_is_gone_until_somebody_needs_it(backend: Backend) -> None:
    bus, queue = backend.bus, train_queue("tiny")
    sent = [TrainGroup(run_id="run", policy="tiny", group_id=f"g{number}") for number in range(2)]
    await bus.delete(queue)
    await bus.publish(sent[0])
    await until_depth(bus, queue, 1)
    await bus.publish(command())
    await bus.delete(queue)
    assert await bus.depth(queue) == 0
    assert not await backend.has(queue)
    await until_depth(bus, ROLLOUTS, 1)
    await bus.publish(sent[1])
    async with bus.consume(queue) as consumer:
        delivery = await take(consumer)
        assert delivery.message == sent[1]
        await delivery.ack()


async def bury(backend: Backend, *bodies: bytes) -> None:
    async with backend.bus.consume(ROLLOUTS) as consumer:
        for body in bodies:
            await backend.put_raw(ROLLOUTS, body)
        await take_nothing(consumer)


async def test_listing_dead_letters_keeps_them(backend: Backend) -> None:
    await bury(backend, b"one", b"two", b"three")
    for _ in range(25):  # more often than RabbitMQ 4's default delivery limit of 20
        assert [letter.body for letter in await backend.bus.dead_letters(limit=2)] == [b"one", b"two"]
    assert len({letter.id for letter in await backend.bus.dead_letters()}) == 3


async def test_retry_of_one_dead_letter(backend: Backend) -> None:
    bus = backend.bus
    await bury(backend, b"one", b"two")
    first, second = await bus.dead_letters(None)
    assert await bus.retry("no such id") == 0
    assert await bus.retry(queue=WORKSPACES) == await bus.retry(second.id, queue=WORKSPACES) == 0
    assert await bus.retry(second.id) == 1
    assert await bus.dead_letters() == [first]
    await until_depth(bus, ROLLOUTS, 1)


async def test_retry_of_all_gives_them_a_clean_record(bus: Bus) -> None:
    assert await bus.retry() == 0
    await bus.publish(command(), priority=4)
    async with bus.consume(ROLLOUTS) as consumer:
        for _ in range(DELIVERY_LIMIT):
            await (await take(consumer)).reject("failure")
        assert await bus.retry() == 1
        assert await bus.dead_letters() == []
        for _ in range(DELIVERY_LIMIT - 1):
            await (await take(consumer)).reject("failure")
        await (await take(consumer)).ack()
    assert await bus.dead_letters() == []
