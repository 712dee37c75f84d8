from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.migrate import migrate
from tests.unit.orchestrator.world import World


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    await world.start()
    yield world
    await world.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path):
    """URL of an empty database: once SQLite, once Postgres."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("fresh_database_url")


@asynccontextmanager
async def two_ledgers(url):
    async with AsyncExitStack() as stack:
        pair = (Ledger(url), Ledger(url))
        for each in pair:
            stack.push_async_callback(each.close)
            await migrate(each)
        yield pair


@pytest.fixture
async def ledgers(database_url):
    """Two ledgers over one migrated database, as two orchestrators have them; once on SQLite, once on Postgres."""
    async with two_ledgers(database_url) as pair:
        yield pair


@pytest.fixture
async def two_on_postgres(fresh_database_url):
    """The same, for what only Postgres does: writers side by side."""
    async with two_ledgers(fresh_database_url) as pair:
        yield pair


@pytest.fixture
async def ledger(ledgers):
    """One ledger over a migrated database."""
    return ledgers[0]
