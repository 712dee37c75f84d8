"""What only the bus in this process can do: serve several threads, each with its own event loop; and the choice of a bus."""

import asyncio
import threading

import pytest

from evener.bus import MemoryBus, connect
from evener.errors import InputError
from evener.messages import ROLLOUTS, RunRollout


def command(number: int) -> RunRollout:
    return RunRollout(run_id="run", rollout_id=f"rollout-{number}", attempt=1)


async def test_greater_priority_first_then_the_older() -> None:
    bus = MemoryBus()
    for number, priority in enumerate((0, 3, 9, 3, 5)):
        await bus.publish(command(number), priority=priority)
    seen: list[str] = []
    async with bus.consume(ROLLOUTS) as consumer:
        for _ in range(5):
            delivery = await consumer.get()
            seen.append(getattr(delivery.message, "rollout_id", ""))
            await delivery.ack()
    assert seen == ["rollout-2", "rollout-4", "rollout-1", "rollout-3", "rollout-0"]


async def test_handed_back_keeps_its_place() -> None:
    bus = MemoryBus()
    for number in range(2):
        await bus.publish(command(number))
    async with bus.consume(ROLLOUTS) as consumer:
        first = await consumer.get()
        await first.hand_back()
        assert (await consumer.get()).message == first.message


async def test_other_threads_publish_to_a_waiting_consumer() -> None:
    bus = MemoryBus()

    def publish(base: int) -> None:
        async def all_of_them() -> None:
            for number in range(100):
                await bus.publish(command(base + number))

        asyncio.run(all_of_them())

    threads = [threading.Thread(target=publish, args=(base,)) for base in (0, 100, 200)]
    seen: set[str] = set()
    async with asyncio.timeout(10), bus.consume(ROLLOUTS, prefetch=3) as consumer:
        for thread in threads:
            thread.start()
        while len(seen) < 300:
            delivery = await consumer.get()
            seen.add(getattr(delivery.message, "rollout_id", ""))
            await delivery.ack()
    for thread in threads:
        thread.join(5)


async def test_a_dead_loop_with_an_open_consumer_disturbs_nobody() -> None:
    bus = MemoryBus()

    def abandon() -> None:
        async def enter() -> None:
            await bus.consume(ROLLOUTS).__aenter__()

        asyncio.run(enter())

    await asyncio.to_thread(abandon)
    await bus.publish(command(1))
    assert await bus.depth(ROLLOUTS) == 1


def test_without_a_url_the_bus_is_in_this_process() -> None:
    assert isinstance(connect(None), MemoryBus)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(InputError, match="EVENER_AMQP_URL"):
        connect("kafka://127.0.0.1")
