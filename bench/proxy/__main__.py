"""Both proxies in one run, turn about; ends with a line of figures, and with 1 where `bench.proxy.summary` finds one too low.

``python -m bench.proxy [--seconds 4] [--repetitions 3]`` (`make bench-proxy`). What is compared is the CPU time
of the proxy process alone, so that a busy machine hurts the rates but hardly the ratios; what Redis used stands beside it.
"""

import argparse
import contextlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.proxy import checks, rival, summary
from bench.proxy.client import Connection
from bench.proxy.conversation import PATHS, Dialect, bodies
from bench.proxy.load import TURNS, Case, measure
from bench.proxy.processes import ROOT
from bench.proxy.sides import Engine, Ours, Redis, Rival, Side

CLIENTS = (1, 32, 256)
OUT = ROOT / ".out" / "bench-proxy.json"
KEPT = ROOT / "bench" / "results" / "proxy.json"


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="bench.proxy", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="least length of one measurement")
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each call in flight has two sockets in the proxy
    try:
        python = rival.python()
        result = uvloop.run(_run(python, asked.seconds, asked.repetitions))
    except (rival.RivalMissing, RuntimeError) as error:
        print(f"bench-proxy: {error}", file=sys.stderr)
        return 2
    document = json.dumps(result, indent=1)
    for place in (OUT, KEPT):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(document + "\n")
    print(summary.table(result["cases"]))
    for line in result["missed"]:
        print(f"MISSED: {line}")
    print("bench-proxy: " + " ".join(f"{name}={value}" for name, value in result["figures"].items()))
    return 1 if result["missed"] else 0


async def _run(python: Path, seconds: float, repetitions: int) -> dict[str, Any]:
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="evener-bench-") as place, contextlib.ExitStack() as exits:
        folder = Path(place)
        engine = Engine(folder)
        exits.callback(engine.process.stop)
        await engine.ready()
        everysec, always = Redis(folder, "everysec"), Redis(folder, "always")
        for redis in (everysec, always):
            exits.callback(redis.process.stop)
        ours, synced, theirs = Ours(folder, engine, everysec), Ours(folder, engine, always), Rival(folder, engine, python)
        for side in (ours, synced, theirs):
            exits.callback(side.proxy.stop)
        for side in (ours, synced, theirs):
            await side.ready()
        plan = await _plan(ours, synced, theirs)
        rows = await _measure(plan, seconds, repetitions)
        _say("calls in flight, open sessions, a kill in mid-load")
        checked = {
            "inflight": await checks.inflight(folder, everysec),
            "sessions": await checks.open_sessions(folder, engine, everysec),
            "kill": await checks.killed(folder, engine, everysec, seconds),
        }
    return summary.result(rows, checked, began=began, seconds=seconds, repetitions=repetitions)


async def _plan(ours: Ours, synced: Ours, theirs: Rival) -> list[tuple[Case, list[Side]]]:
    """Each case with the sides that it is measured on, in turn."""
    dialects: list[Dialect] = ["chat"]
    if await _speaks(ours, "anthropic"):
        dialects.append("anthropic")
    else:
        _say("SKIPPED: the Anthropic rows, since our proxy answers 404 there")
    cases = [Case(clients, tokens, dialect) for dialect in dialects for tokens in TURNS for clients in CLIENTS]
    every: list[Side] = [theirs, ours, theirs.without_export(), synced]
    return [(case, every if case.clients == 32 and case.dialect == "chat" else [theirs, ours]) for case in cases]


async def _speaks(side: Ours, dialect: Dialect) -> bool:
    admin, calls = Connection(side.admin_port), Connection(side.port)
    session, key = await side.open(admin)
    status, _ = await calls.request("POST", PATHS[dialect], bodies(dialect, 500, 1)[0], key)
    await side.close(admin, session)
    admin.close()
    calls.close()
    return status != 404


async def _measure(plan: list[tuple[Case, list[Side]]], seconds: float, repetitions: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    total = repetitions * sum(len(sides) for _, sides in plan)
    for case, sides in plan:
        for _ in range(repetitions):
            for side in sides:
                redis = side.redis if isinstance(side, Ours) else None
                row = await measure(side, case, seconds, redis.process if redis else None)
                row["fsync"] = redis.fsync if redis else None
                rows.append(row)
                name = side.name if redis is None else f"{side.name} ({redis.fsync})"
                _say(
                    f"[{len(rows):>3}/{total}] {case}: {name:<22} {row['cpu_ms']:>7.2f} ms CPU a call"
                    f" {row['calls_s']:>7.1f} calls/s  health p99 {row['health_p99_ms']:>6.1f} ms"
                )
    return rows


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
