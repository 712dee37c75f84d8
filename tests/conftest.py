"""Fixtures that every test may ask for, and the line that counts what was skipped for want of a service."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog
from hypothesis import HealthCheck, settings

from evener.ids import new_id
from evener.messages import DEAD, EVENTS, ROLLOUTS, WORKSPACES, train_queue
from tests.services import INSTALL, Rabbit, running_postgres, running_rabbit, running_redis

# Wall-clock limits of hypothesis say more of what else the machine does than of what is tested.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

TEST_POLICY = "tiny"
"""The one policy that tests on a real broker train: its queue is known, so it can be emptied."""


@pytest.fixture(autouse=True)
def logs_of_its_own() -> Iterator[None]:
    """A command that ran inside a test has sent the logs to a stream that is closed by now."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[Rabbit]:
    """One RabbitMQ for all tests."""
    with running_rabbit() as rabbit:
        yield rabbit


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of one Redis for all tests."""
    with running_redis() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL (``postgresql+asyncpg://``) of one Postgres for all tests."""
    with running_postgres() as url:
        yield url


@pytest.fixture
def fresh_amqp_url(rabbitmq: Rabbit) -> str:
    """URL of a RabbitMQ without any queue or exchange of ours."""
    with ThreadPoolExecutor(1) as thread:  # a plain fixture, so that another may ask for it by name
        thread.submit(asyncio.run, empty(rabbitmq.url)).result(30)
    return rabbitmq.url


async def empty(amqp_url: str) -> None:
    """Delete what a bus makes."""
    import aio_pika

    async with await aio_pika.connect(amqp_url, timeout=10) as connection:
        channel = await connection.channel()
        for queue in (ROLLOUTS, WORKSPACES, EVENTS, DEAD, train_queue(TEST_POLICY)):
            await channel.queue_delete(queue)
        for exchange in ("evener", DEAD):
            await channel.exchange_delete(exchange)


@pytest.fixture
def fresh_redis_url(redis_url: str) -> str:
    """URL of an empty Redis database."""
    import redis

    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    return redis_url


@pytest.fixture
async def fresh_database_url(postgres_url: str) -> AsyncIterator[str]:
    """URL of an empty Postgres database, dropped afterwards."""
    import asyncpg

    name = f"evener_test_{new_id().replace('-', '')}"
    admin = await asyncpg.connect(postgres_url.replace("+asyncpg", ""), timeout=10)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        yield re.sub(r"/[^/]*$", f"/{name}", postgres_url)
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was not tested."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        found = re.search(r"needs (\w+): ", str(report.longrepr))
        if found and found[1] in INSTALL:
            counts[found[1]] += 1
    if counts:
        parts = "; ".join(f"{count} tests need {service} ({INSTALL[service]})" for service, count in counts.items())
        terminalreporter.write_line(f"NOT TESTED: {parts}", red=True, bold=True)
