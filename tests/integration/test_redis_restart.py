"""A Redis that may have lost captures when it restarts voids its sessions; one that loses nothing does not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from evener.api.types import Budget
from evener.trace.session import SessionSpec
from evener.trace.store import Intent, Refused, Sending, TraceStore
from tests.ports import free_port
from tests.services import Process, answers, find, missing

SPEC = SessionSpec(
    session_id="s.1", rollout_id="s", attempt=1, harness="pi", policy="tiny", purpose="train", budget=Budget(calls=9)
)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Process, int]]:
    """A Redis of its own, with the parameter as its ``appendfsync``."""
    program = find("redis-server")
    if program is None:
        missing("redis")
    port = free_port()
    argv = [str(program), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    process = Process([*argv, "--appendonly", "yes", "--appendfsync", request.param], tmp_path)
    start(process, port)
    yield process, port
    process.stop()


def start(process: Process, port: int) -> None:
    process.start(lambda: answers("127.0.0.1", port, b"PING\r\n", b"+PONG"))


@pytest.mark.parametrize(("server", "kept"), [("always", True), ("everysec", False)], indirect=["server"])
async def test_a_restart_is_noticed_where_it_may_lose_calls(server: tuple[Process, int], kept: bool) -> None:
    process, port = server
    async with asyncio.timeout(60), redis.asyncio.from_url(f"redis://127.0.0.1:{port}/0") as client:
        store = TraceStore(client)
        await store.open(SPEC, "hash")
        session = await store.by_key("hash")
        assert session is not None

        async def intent(call: str) -> object:
            return await store.intent(session, call, replica="r", asked=5, digests=[], sending=Sending(call.encode()))

        assert isinstance(await intent("a"), Intent)
        await asyncio.to_thread(process.stop)
        await asyncio.to_thread(start, process, port)
        if kept:
            assert isinstance(await intent("b"), Intent)
        else:
            with pytest.raises(Refused, match="lost"):
                await intent("b")
        state = await store.read(SPEC.session_id)
        assert state is not None
        assert state.fault == (None if kept else "session_lost")
