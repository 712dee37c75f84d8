"""The weights' way into an engine, against the bodies of a real vLLM."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from evener.engines.weights import ATTEMPTS, DiskWeightSink, replace_weights
from evener.errors import InfraError
from evener_learner import publisher as module
from evener_learner.publisher import Publisher
from tests.unit.learner.engines import StubEngine, serving

UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
PAUSE = "/pause?mode=keep&clear_cache=true"


async def test_an_update_keeps_running_calls_and_clears_the_cache(tmp_path: Path) -> None:
    engine = StubEngine()
    async with serving(engine.handle) as url, DiskWeightSink(url) as sink:
        assert await sink.version() is None
        await replace_weights(sink, tmp_path, 7)
        assert await sink.version() == 7
    assert engine.calls == [PAUSE, *UPDATE, "/resume"]
    assert engine.path == str(tmp_path)


async def test_a_half_way_failure_is_repaired_by_the_whole_again(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.fail = {"/update_weights": 1}
    async with serving(engine.handle) as url, DiskWeightSink(url) as sink:
        await replace_weights(sink, tmp_path, 2)
    assert engine.calls == [PAUSE, *UPDATE[:2], "/init_weight_transfer_engine", *UPDATE, "/resume"]
    assert (engine.version, engine.paused) == ("2", False)


async def test_an_update_that_somebody_began_is_gone_on_with(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.fail = {"/start_weight_update": ATTEMPTS}  # vLLM, while an update is under way
    async with serving(engine.handle) as url, DiskWeightSink(url) as sink:
        await replace_weights(sink, tmp_path, 2)
    assert engine.calls == [PAUSE, UPDATE[0], "/init_weight_transfer_engine", *UPDATE[1:], "/resume"]
    assert engine.version == "2"


async def test_it_resumes_when_it_gives_up(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.fail = {"/finish_weight_update": ATTEMPTS}
    async with serving(engine.handle) as url, DiskWeightSink(url) as sink:
        with pytest.raises(InfraError, match="finish_weight_update: 500"):
            await replace_weights(sink, tmp_path, 2)
    assert engine.calls[-1] == "/resume"
    assert not engine.paused


async def test_an_engine_that_is_away_is_named() -> None:
    async with DiskWeightSink("http://127.0.0.1:9") as sink:
        with pytest.raises(InfraError, match=r"127\.0\.0\.1:9") as caught:
            await sink.version()
    assert caught.value.cause == "engine_unavailable"


async def test_live_an_engine_that_hangs_is_an_error() -> None:
    async def hang(request: object) -> None:
        await asyncio.sleep(30)

    async with serving(hang) as url, DiskWeightSink(url, timeout_s=0.2) as sink:
        with pytest.raises(InfraError, match=r"/pause.*Timeout"):
            await sink.pause()


async def test_an_engine_that_closes_the_connection_on_which_it_failed_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    """As vLLM does, without having said so in its answer."""
    engine, connections = StubEngine(), set[object]()
    engine.fail = {"/update_weights": ATTEMPTS}

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        assert request.transport not in connections, "it would be closed by now"
        connections.add(request.transport)
        return await engine.handle(request)

    async with serving(handle) as url, DiskWeightSink(url) as sink:
        with pytest.raises(InfraError, match="update_weights: 500"):
            await replace_weights(sink, tmp_path, 2)
    assert (engine.paused, len(connections)) == (False, len(engine.calls))


async def test_the_publisher_waits_for_an_engine_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    engine = StubEngine()
    async with serving(engine.handle) as url:
        port = int(url.rsplit(":", 1)[1])
    async with DiskWeightSink(url) as sink:
        publication = asyncio.create_task(Publisher([sink]).publish(3, tmp_path))
        await asyncio.sleep(0.2)
        assert not publication.done()
        async with serving(engine.handle, port):
            await asyncio.wait_for(publication, 5)
    assert engine.version == "3"


async def test_a_restarted_engine_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.05)
    engine = StubEngine()
    async with serving(engine.handle) as url, DiskWeightSink(url) as sink:
        publisher = Publisher([sink])
        await publisher.publish(3, tmp_path)
        watch = asyncio.create_task(publisher.watch())
        engine.version = "default"
        await _until(lambda: engine.version == "3")
        publisher.forget()
        engine.version = "default"
        await asyncio.sleep(0.2)
        watch.cancel()
    assert engine.version == "default"


async def _until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)
