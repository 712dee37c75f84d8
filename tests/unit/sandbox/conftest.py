"""Sandboxes in a temporary folder; bubblewrap tests run wherever bubblewrap works, and say why where they do not."""

from contextlib import asynccontextmanager

import pytest

from evener.sandbox import Folder, SandboxSpec, create
from evener.sandbox.probe import bubblewrap_missing


@pytest.fixture
async def bubblewrap():
    missing = await bubblewrap_missing()
    if missing:
        pytest.skip(f"bubblewrap does not work here: {missing}")


@pytest.fixture
def sandbox(tmp_path):
    @asynccontextmanager
    async def make(kind, **spec):
        folder = Folder.make(tmp_path / "sandboxes", "one", ttl_s=60)
        box = await create(kind, SandboxSpec(folder, **spec))
        try:
            yield box
        finally:
            await box.destroy()
            assert not folder.path.exists()

    return make
