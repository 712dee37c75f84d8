"""A verifier is killed at each of its steps: its workspace is scored all the same, once, and nothing of it is left."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from evener.blobs import Blobs
from evener.bus.memory import MemoryBus
from evener.messages import EVENTS, RolloutScored, ScoreWorkspace, decode, encode
from evener.sandbox.probe import bubblewrap_missing
from evener.settings import Settings
from evener_verifier import service
from tests.unit.verifier.dying import STEPS
from tests.unit.verifier.orders import order

ROOT = Path(__file__).resolve().parents[3]
TEST = b"sleep 0.6; cat /workspace/score > /logs/verifier/reward.txt\n"
REPORTED = ("reported", "acknowledged")


class Ledger:
    """What the ledger does with scores: the first is recorded, and the attempt is past scoring."""

    def __init__(self, wanted):
        self.order = wanted
        self.recorded: list[RolloutScored] = []
        self.refused: list[RolloutScored] = []

    def record(self, scored):
        (self.refused if self.recorded else self.recorded).append(scored)

    async def scoring(self, request):
        assert request.match_info["session"] == self.order.session_id
        if self.recorded:
            return web.json_response({"detail": "past scoring"}, status=409)
        return web.Response(body=msgspec.json.encode(self.order))

    async def events(self, request):
        self.record(decode(await request.read()))
        return web.Response()


@pytest.fixture
async def ledger(tmp_path):
    if missing := await bubblewrap_missing():
        pytest.skip(f"bubblewrap does not work here: {missing}")
    ledger = Ledger(order(Blobs(tmp_path / "blobs"), "bubblewrap", TEST, {"score": b"0.75"}))
    app = web.Application()
    app.add_routes([web.post("/v1/attempts/{session}/scoring", ledger.scoring), web.post("/events", ledger.events)])
    server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    ledger.url = f"http://127.0.0.1:{server.addresses[0][1]}"
    yield ledger
    await server.cleanup()


def processes_of(folder):
    """The ids of processes that have a path below ``folder`` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if os.fsencode(f"{folder}/") in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def die_at(step, folder, url, command):
    paths = [str(ROOT), *(str(path) for path in (ROOT / "services").iterdir())]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__.replace("test_killed", "dying"), step, str(folder), url),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        await process.communicate(encode(command))
    assert process.returncode == -9, f"it did not get as far as {step!r}"


@pytest.mark.parametrize("step", STEPS)
async def test_no_score_is_lost_and_none_is_doubled(step, ledger, tmp_path):
    command = ScoreWorkspace(run_id="r", rollout_id=ledger.order.session_id.split(".")[0], attempt=1)
    await die_at(step, tmp_path, ledger.url, command)
    assert len(ledger.recorded) == (step in REPORTED)

    bus, stop = MemoryBus(), asyncio.Event()  # the broker delivers again, or the ledger asks again
    await bus.publish(command)
    settings = Settings(data=tmp_path / "data", url=ledger.url, verifier_slots=1)
    serving = asyncio.create_task(service.serve(settings, bus, Blobs(tmp_path / "blobs"), stop=stop, name="second"))
    async with asyncio.timeout(60):
        while await bus.depth("workspaces.score") or (not ledger.recorded and not await bus.depth(EVENTS)):
            await asyncio.sleep(0.02)
        async with bus.consume(EVENTS) as consumer:
            if not ledger.recorded:
                delivery = await consumer.get()
                ledger.record(delivery.message)
                await delivery.ack()
    stop.set()
    await asyncio.wait_for(serving, 30)
    assert [scored.scores for scored in ledger.recorded] == [{"reward": 0.75}]
    assert not ledger.refused
    assert not await bus.depth(EVENTS)
    assert not list((tmp_path / "data/sandboxes").iterdir())
    async with asyncio.timeout(10):
        while processes_of(tmp_path / "data/sandboxes"):
            await asyncio.sleep(0.05)
