"""An agent does not see that the proxy restarts, only that it is slow; one that stays away is noticed."""

import asyncio
import os

import pytest

from evener.sandbox import pump
from evener.sandbox.pump import SOCKET, Pump
from tests.ports import free_port


@pytest.fixture
async def way(tmp_path):
    """A pump to a port where nobody listens yet, and the port."""
    port = free_port()
    made = Pump(tmp_path / "proxy", ("127.0.0.1", port))
    await made.open(os.geteuid())
    yield made, str(tmp_path / "proxy" / SOCKET), port
    await made.close()


async def echo(reader, writer):
    writer.write(b"answer to " + await reader.read(100))
    await writer.drain()
    writer.close()


async def test_a_connection_waits_for_a_proxy_that_starts(way):
    made, path, port = way
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"call")
        await asyncio.sleep(0.6)
        server = await asyncio.start_server(echo, "127.0.0.1", port)
        assert await reader.read(100) == b"answer to call"
        assert not made.unreachable
        writer.close()
        server.close()


async def test_a_proxy_that_stays_away_is_noticed(way, monkeypatch):
    monkeypatch.setattr(pump, "CONNECT_S", 0.3)
    made, path, _ = way
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read(100) == b""
        assert made.unreachable
        writer.close()
