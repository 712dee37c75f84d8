"""`make bench-load`: scripted rollouts on real stores and services: rollouts a second, and what grows meanwhile.

Real: RabbitMQ, Redis, Postgres, orchestrators, proxies, and every message, request and transaction between them. Scripted:
the engine, the agents (a session with `--calls` calls each), what runners and verifiers do in sandboxes, and the learner's
training; with ``--real`` only the engine and what the agents do. Prints ``bench-load: rollouts_per_s= rss_growth_mb= p99_ms=``,
writes .out/bench-load.json with the rows (`--keep`: bench/results/load.json without them, too), and ends with 0 where nothing
misses its bound (`bench.load.figures`).
"""

import argparse
import asyncio
import contextlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.load import figures
from bench.load.learner import Learner
from bench.load.place import HARNESS, QUICK, ROLLOUTS_PER_STEP, Place, run_file, running
from bench.load.watch import Watch
from bench.load.workers import Times, Workers
from evener import runfile
from evener.api import ApiClient
from evener.bus import connect
from evener.cli.submit import prepare, submit
from evener.errors import InfraError
from evener.proxy_admin import ProxyAdmin
from tests.e2e.place import ROOT

OUT = ROOT / ".out" / "bench-load.json"
KEPT = ROOT / "bench" / "results" / "load.json"
STUCK_S = 300.0
"""Longest without a rollout's end."""


class Stuck(Exception):
    """The run does not go on."""


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=3000, help=f"rounded up to steps of {ROLLOUTS_PER_STEP}")
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=2, help="of each agent")
    parser.add_argument("--offered", type=float, default=50.0, help="rollouts a second that the agents' pauses allow")
    parser.add_argument("--orchestrators", type=int, default=2)
    parser.add_argument("--proxies", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="real runners, verifiers and learner: what they hold, and no rate")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.relative_to(ROOT)} as well")
    asked = parser.parse_args()
    asked.rollouts = -(-asked.rollouts // ROLLOUTS_PER_STEP) * ROLLOUTS_PER_STEP
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="evener-load-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        folder.chmod(0o755)
        try:
            with running(folder, orchestrators=asked.orchestrators, proxies=asked.proxies, real=asked.real) as running_place:
                document = uvloop.run(_measure(running_place, asked))
        except (Stuck, InfraError, RuntimeError) as error:
            print(f"bench-load: {error}", file=sys.stderr)
            return 2
    return _report(document, keep=asked.keep)


def _report(document: dict[str, Any], *, keep: bool) -> int:
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(document) + "\n")
    if keep:
        KEPT.write_text(json.dumps({name: part for name, part in document.items() if name != "rows"}, indent=1) + "\n")
    print(figures.table(document))
    for name in ("transactions_per_rollout", "confirmed_messages_per_rollout", "queue_depth_max", "most_at_work", "counts"):
        print(f"{name}: {document[name]}")
    for line in document["missed"]:
        print(f"MISSED: {line}")
    print("bench-load: " + " ".join(f"{name}={value}" for name, value in document["figures"].items()))
    return 1 if document["missed"] else 0


async def _measure(place: Place, asked: argparse.Namespace) -> dict[str, Any]:
    times = Times()
    began = time.time()
    async with contextlib.AsyncExitStack() as exits:
        bus = connect(place.stack.amqp)
        exits.push_async_callback(bus.close)
        api = await exits.enter_async_context(ApiClient(place.url, place.token))
        beats = await exits.enter_async_context(ApiClient(place.url, place.token))
        admin = await exits.enter_async_context(ProxyAdmin(place.admin_url, place.token))
        http = await exits.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))
        )
        workers = Workers(
            bus=bus,
            api=api,
            beats=beats,
            admin=admin,
            http=http,
            proxy_url=place.proxy_url,
            slots=asked.in_flight,
            calls=asked.calls,
            agent_s=asked.in_flight / asked.offered,
            times=times,
        )
        watch = Watch(place.pids(), bus, lambda: workers.at_work)
        harness = QUICK if asked.real else HARNESS
        file = run_file(place.folder, rollouts=asked.rollouts, in_flight=asked.in_flight, harness=harness)
        await submit(api, prepare(runfile.read(file), {harness}), new=False)
        learner = Learner(bus, api, http, place.engine_url, times)
        scripted = () if asked.real else (workers.run_rollouts, workers.score_workspaces, learner.run)
        tasks = [asyncio.create_task(loop()) for loop in (*scripted, watch.run)]
        try:
            await _until_over(api, watch, tasks, times)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    from_ledger = await figures.from_ledger(place.stack.database, times)
    began_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
    told = {name: value for name, value in vars(asked).items() if name != "keep"}
    return {"began": began_at, **figures.result(from_ledger, watch.rows, times, told)}


async def _until_over(api: ApiClient, watch: Watch, tasks: list[asyncio.Task[None]], times: Times) -> None:
    """Wait for the run's end and for the release of its sessions. Raises Stuck, and what a worker raised."""
    since = time.monotonic()
    while True:
        state = await api.get("/v1/runs/latest")
        done = state["rollouts"]["done"]
        if done > watch.done:
            watch.done, since = done, time.monotonic()
        if state["state"] not in ("running", "paused"):
            break
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() - since > STUCK_S:
            raise Stuck(f"no rollout has ended for {STUCK_S:g} s; {done} have: {state['rollouts']}")
        at_work = watch.rows[-1]["at_work"] if watch.rows else 0
        print(f"  {time.strftime('%H:%M:%S')} {done} rollouts, {at_work} at work", flush=True)
        await asyncio.sleep(2.0)
    if state["state"] != "done":
        counts = f"{state['rollouts']['outcomes']}, {dict(times.counts)}"
        raise Stuck(f"the run is {state['state']}: {state['reason']}; {counts}")
    await asyncio.sleep(5.0)  # the last sessions are released every two seconds


if __name__ == "__main__":
    sys.exit(main())
