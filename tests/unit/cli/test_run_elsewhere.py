"""`evener run` with EVENER_URL submits to that stack and shows the run; it starts and writes nothing of a stack here."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import SecretStr

from evener.cli.run import run
from evener.errors import InputError
from evener.settings import Settings
from tests.e2e.place import run_file

RUN = {
    "run_id": "0-1",
    "name": "small",
    "kind": "train",
    "policy": "small",
    "phase": "train",
    "reason": None,
    "version": 2,
    "step": 2,
    "steps": 2,
    "expected": 8,
    "started": 1.0,
    "ended": 9.0,
    "sampled_tokens": 5,
    "pass1": [],
    "groups": {},
    "staleness": {"mean": None, "max": None},
    "evaluating": None,
    "harnesses": ["pi"],
    "sandboxes": [],
    "rollouts": {"done": 8, "total": 8, "running": 0, "queued": 0, "planned": 0, "scoring": 0, "outcomes": {"finished": 8}},
}


@dataclass
class Api:
    """What the stack was asked, and the states of the run that it answers with."""

    settings: Settings
    in_use: str = ""
    states: list[str] = field(default_factory=lambda: ["running", "done"])
    asked: list[str] = field(default_factory=list[str])

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        await request.read()
        assert request.headers["Authorization"] == "Bearer t"
        match request.method, request.path.split("/")[2:]:
            case "POST", ["runs"] if self.in_use:
                return web.json_response({"detail": self.in_use, "cause": "stack_in_use"}, status=409)
            case "POST", ["runs"]:
                return web.json_response({"run_id": "0-1", "resumed": False, "state": "running", "policy": "small"})
            case "GET", ["runs", _]:
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                return web.json_response({**RUN, "state": state})
            case "PUT", ["policies"]:
                return web.json_response({"weights": "sha256:" + "0" * 64})
            case _:
                return web.json_response({})


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    made = Api(Settings())
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", made.handle)
    server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    made.settings = Settings(url=url, api_token=SecretStr("t"), data=tmp_path / "data")
    yield made
    await server.cleanup()


async def test_it_submits_and_shows(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = await asyncio.wait_for(run(api.settings, run_file(tmp_path), new=False, evaluate=False, as_json=True), 60)
    assert code == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"
    puts = [line for line in api.asked if line.startswith("PUT /v1/tasks/sha256:")]
    assert len(puts) > 10
    assert api.asked.index("POST /v1/runs") > api.asked.index("PUT /v1/policies") > 0
    assert not (tmp_path / "data").exists()


async def test_a_second_run_is_refused(api: Api, tmp_path: Path) -> None:
    api.in_use = "run first (0-0) is running"
    with pytest.raises(InputError, match=r"run first \(0-0\) is running") as caught:
        await asyncio.wait_for(run(api.settings, run_file(tmp_path), new=False, evaluate=False, as_json=True), 60)
    assert (caught.value.cause, caught.value.exit_code) == ("stack_in_use", 2)
    assert api.asked[-1] == "POST /v1/runs"
