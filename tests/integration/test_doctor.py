"""`evener doctor` on real stores: what stops a run is named, and what is well is said to be."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import redis

from evener.bus.amqp.bus import AmqpBus
from evener.cli.stores import examine_stores
from evener.messages import RunRollout, ScoreWorkspace
from evener.settings import Settings
from tests.services import Rabbit, find, local_rabbit, missing, stop_name_server


@contextlib.contextmanager
def a_broker(*, free_disk: str = "10MB") -> Iterator[Rabbit]:
    """A broker of its own, which wants so much free disk."""
    server = find("rabbitmq-server", Path("/usr/lib/rabbitmq/bin"))
    if server is None:
        missing("rabbitmq")
    with tempfile.TemporaryDirectory(prefix="evener-rabbitmq-", ignore_cleanup_errors=True) as folder:
        broker = local_rabbit(Path(folder), server)
        assert broker.process is not None
        file = Path(folder) / "rabbitmq.conf"
        limit = "disk_free_limit.absolute = "
        file.write_text(file.read_text().replace(f"{limit}10MB", f"{limit}{free_disk}"))
        try:
            broker.start()
            yield broker
        finally:
            broker.stop()
            stop_name_server(broker.process.env)


@pytest.fixture
def full_broker() -> Iterator[Rabbit]:
    """A broker that wants more free disk than there is."""
    with a_broker(free_disk="100000GB") as broker:
        yield broker


@pytest.fixture
def broker() -> Iterator[Rabbit]:
    """A broker that may be killed."""
    with a_broker() as broker:
        yield broker


def line(name: str, **settings: str) -> tuple[str, str]:
    """State and detail of one store."""
    with tempfile.TemporaryDirectory() as folder:
        (found,) = (each for each in examine_stores(Settings(data=Path(folder), **settings)) if each.name == name)
    return found.state, found.detail


def test_stores_that_are_well(fresh_amqp_url: str, fresh_redis_url: str, fresh_database_url: str) -> None:
    for name, setting, url in (
        ("rabbitmq", "amqp_url", fresh_amqp_url),
        ("redis", "redis_url", fresh_redis_url),
        ("postgres", "database_url", fresh_database_url),
    ):
        assert line(name, **{setting: url}) == ("ok", f"127.0.0.1:{urlsplit(url).port}")


def test_a_broker_with_a_disk_alarm(full_broker: Rabbit) -> None:
    state, detail = line("rabbitmq", amqp_url=full_broker.url)
    assert state == "missing"
    assert "memory or disk alarm" in detail


def test_a_queue_without_a_leader(broker: Rabbit) -> None:
    """RabbitMQ forgets who leads a quorum queue when it is killed right after its declaration; here it has happened."""

    async def declare_and_kill() -> None:
        bus = AmqpBus(broker.url)
        async with asyncio.timeout(60):
            await bus.publish(RunRollout(run_id="r", rollout_id="o", attempt=1))
            await asyncio.sleep(3.0)
            await bus.publish(ScoreWorkspace(run_id="r", rollout_id="o", attempt=1))
            assert broker.process is not None
            broker.process.kill()
            await bus.close()

    asyncio.run(declare_and_kill())
    broker.start()
    state, detail = line("rabbitmq", amqp_url=broker.url)
    assert state == "missing"
    assert detail.startswith("queue workspaces.score has no leader and serves nobody")


def test_dead_letters(fresh_amqp_url: str) -> None:
    async def bury() -> None:
        bus = AmqpBus(fresh_amqp_url)
        try:
            message = RunRollout(run_id="r", rollout_id="o", attempt=1)
            async with asyncio.timeout(30), bus.consume("rollouts.run") as consumer:
                await bus.publish(message)
                for _ in range(5):
                    await (await consumer.get()).reject("it is poison")
        finally:
            await bus.close()

    asyncio.run(bury())
    assert line("rabbitmq", amqp_url=fresh_amqp_url) == (
        "note",
        "1 dead letters: see `evener dead ls`, then `evener dead retry`",
    )


def test_a_redis_without_memory(fresh_redis_url: str) -> None:
    with redis.Redis.from_url(fresh_redis_url) as client:
        client.config_set("maxmemory", "1mb")
        try:
            state, detail = line("redis", redis_url=fresh_redis_url)
        finally:
            client.config_set("maxmemory", "0")
    assert state in ("missing", "note")
    assert "raise maxmemory" in detail


def test_a_database_that_takes_nothing(fresh_database_url: str) -> None:
    async def confine() -> None:
        connection = await asyncpg.connect(fresh_database_url.replace("+asyncpg", ""), timeout=10)
        name = urlsplit(fresh_database_url).path.removeprefix("/")
        await connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await connection.close()

    asyncio.run(confine())
    state, detail = line("postgres", database_url=fresh_database_url)
    assert state == "missing"
    assert "read-only" in detail
