import pytest

from tests.unit.orchestrator.world import World


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    await world.start()
    yield world
    await world.close()
