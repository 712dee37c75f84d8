"""Wrong bodies through the whole agent side: each is answered, what is refused leaves no call, and no log holds a key."""

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from redis.exceptions import RedisError

from evener import log
from evener.api.types import Budget
from evener.engines.sampler import EngineStatus, Sample, SampleRequest, ToolCall
from evener.trace.store import TraceStore
from evener_proxy.app import create_app
from evener_proxy.calls import Calls
from evener_proxy.delivery import Delivery, Patience
from evener_proxy.dialects.chat import ChatDialect
from evener_proxy.engines import Engines
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Sessions
from tests.unit.proxy.asks import DIALECTS, question
from tests.unit.proxy.dialects.mutation import mutated
from tests.unit.proxy.stub import fails, session_spec

GOLDEN = Path(__file__).parent / "dialects" / "golden"
BODIES = 500


class Instant:
    """A sampler that answers at once, if it is asked in JSON."""

    name = "instant"

    async def sample(self, request: SampleRequest, session: str = "") -> Sample:
        json.loads(msgspec.json.encode(request))
        return Sample(
            level="tokens",
            prompt_ids=np.arange(3, dtype=np.int32),
            completion_ids=np.arange(2, dtype=np.int32),
            logprobs=np.zeros(2, np.float32),
            versions=None,
            content="here",
            reasoning="hm",
            tool_calls=[ToolCall("x", "bash", '{"command": "l')],
            finish_reason="length",
            stop_reason=None,
            prompt_tokens=3,
            completion_tokens=2,
        )

    async def status(self) -> EngineStatus:
        return EngineStatus(model="tiny", window=None, version=0)


async def posted(app: Any, path: str, body: bytes, key: str) -> tuple[int, bytes]:
    """Status and body of the answer to one request, without a server."""
    pieces: list[dict[str, Any]] = []
    to_read = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return to_read.pop() if to_read else await asyncio.Event().wait()

    async def send(message: dict[str, Any]) -> None:
        pieces.append(message)

    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }
    await app(scope, receive, send)
    return pieces[0]["status"], b"".join(piece.get("body", b"") for piece in pieces)


@pytest.fixture
def log_file(tmp_path):
    """Where this process logs to meanwhile, all of it."""
    log.configure(level="DEBUG", path=tmp_path / "log")
    yield tmp_path / "log"
    structlog.reset_defaults()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_mutated_body_is_answered_or_refused_and_a_refused_one_leaves_no_call(redis, log_file, dialect):
    store, metrics = TraceStore(redis), Metrics()
    sessions, engines = Sessions(store), Engines([Instant()])
    await engines.all[0].refresh()
    await store.beat(sessions.replica, lease_s=600, sessions=())
    calls = Calls(sessions, engines, metrics)
    app = create_app(sessions, Delivery(calls, sessions, metrics, Patience()), calls, metrics)
    spec = session_spec(budget=Budget(calls=10 * BODIES, sampled_tokens=10**9))
    key = await sessions.open(spec)
    seeds = [path.read_bytes() for path in sorted((GOLDEN / dialect).rglob("*request.json"))]
    rng, taken, statuses = random.Random(dialect), 0, set()
    for _ in range(BODIES):
        path, _ = question(dialect, stream=rng.random() < 0.5)
        status, answer = await posted(app, path, mutated(rng.choice(seeds), rng), key)
        statuses.add(status)
        taken += status == 200
        assert status == 200 or json.loads(answer)["error"]["message"]
    assert statuses == {200, 400}
    assert BODIES * 0.05 < taken < BODIES * 0.95
    sealed = await sessions.seal(spec.session_id)
    assert (sealed.committed, sealed.aborted, sealed.lost) == (taken, 0, 0)
    assert key not in (log_file.read_text() if log_file.exists() else "")


async def test_no_log_line_holds_a_key(proxy, engine, log_file, caplog, monkeypatch):
    """Whatever goes wrong with a call, and wherever its key stands."""
    caplog.set_level(logging.DEBUG)
    _, key = await proxy.open(budget=Budget(calls=1000, sampled_tokens=10**6))
    places = [{"x-api-key": key}, {"x-goog-api-key": key}, {"Authorization": f"Bearer {key}"}]

    async def all_ways(status: int, path: str, body: Any) -> None:
        for headers in [*places, {}]:
            url = proxy.url + path + ("" if headers else ("&" if "?" in path else "?") + f"key={key}")
            async with proxy.http.post(url, json=body, headers=headers) as response:
                assert response.status == status
                await response.read()

    for dialect in DIALECTS:
        path, body = question(dialect)
        await all_ways(200, path, body)
        await all_ways(400, path, {"messages": 5, "contents": 5})
        engine.script = [fails(400, "no")] * 4
        await all_ways(400, path, body)
        engine.script = [fails(404, "gone")] * 4
        await all_ways(503, path, body)
        await all_ways(404, path + "/nothing", body)
    with monkeypatch.context() as broken:
        broken.setattr(ChatDialect, "parse", lambda *_: 1 / 0)
        await all_ways(500, *question("chat"))

    async def gone(*_: Any, **__: Any) -> None:
        raise RedisError("gone")

    monkeypatch.setattr(TraceStore, "intent", gone)
    await all_ways(503, *question("chat"))
    logged = log_file.read_text()
    assert "call_failed" in logged
    assert "store_failed" in logged
    assert key not in logged
    assert key not in caplog.text
