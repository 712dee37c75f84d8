"""From rows to figures: what the ledger says of each rollout's way, what the processes held, and what misses its bound.

Flat means: of the time between half and nine tenths of the rollouts, when the number at work is steady, the medians of the
first and the last fifth are compared for each of our services. Run by `bench.load`.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg

from bench.load.place import REAL
from bench.load.watch import Row
from bench.load.workers import Times

ROLLOUTS_PER_S = 30.0
RSS_GROWTH_MB, HANDLES_GROWTH = 8.0, 8
"""What a service may hold more of at the end of the steady time than at its start: an allocator's and a pool's play. In
10,000 rollouts a leak of 2.5 KB a rollout reaches it."""

QUEUE_BOUND = 1.0
"""Longest queue, as a multiple of what may be in flight."""

STEADY = (0.5, 0.9)
RATE = (0.1, 0.9)

WAYS = {
    "queued -> running": "SELECT claimed_at - created_at FROM attempts WHERE claimed_at IS NOT NULL",
    "ended -> released": "SELECT released_at - ended_at FROM attempts WHERE released_at IS NOT NULL",
    "closed -> trained": "SELECT disposed_at - closed_at FROM groups WHERE state = 'trained'",
}
"""Transitions that the ledger itself times. A group waits for the others of its step, and releases come every two seconds:
both are no delay of the ledger's."""

OF_THE_LEDGER = ("queued -> running", "running -> archived", "archived -> scored")


async def from_ledger(database: str, times: Times) -> dict[str, Any]:
    """What the ledger knows: rates, transitions, outcomes, transactions and messages."""
    connection = await asyncpg.connect(database.replace("+asyncpg", ""), timeout=30)
    try:
        ended = [row[0].timestamp() for row in await connection.fetch("SELECT ended_at FROM rollouts ORDER BY 1")]
        seconds = {way: [row[0].total_seconds() for row in await connection.fetch(query)] for way, query in WAYS.items()}
        seconds["running -> archived"] = await _since(connection, "SELECT id, ended_at FROM attempts", "finished", times)
        scored = "SELECT attempt_id, ended_at FROM scores JOIN rollouts ON rollouts.id = rollout_id"
        seconds["archived -> scored"] = await _since(connection, scored, "scored", times)
        outcomes = await connection.fetch("SELECT outcome, count(*) FROM rollouts GROUP BY 1")
        return {
            "rollouts_per_s": round(_rate(ended), 1),
            "outcomes": {str(row[0]): row[1] for row in outcomes},
            "attempts": await connection.fetchval("SELECT count(*) FROM attempts"),
            "outgoing": await connection.fetchval("SELECT coalesce(max(last_value), 0) FROM outbox_id_seq"),
            "transactions": await connection.fetchval(
                "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
            ),
            "rolled_back": await connection.fetchval(
                "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()"
            ),
            "transitions": {way: quantiles(values) for way, values in sorted(seconds.items())},
        }
    finally:
        await connection.close()


async def _since(connection: asyncpg.Connection, query: str, what: str, times: Times) -> list[float]:
    """Seconds from a report's publication to what the ledger recorded of it."""
    found = [(times.published.get(f"{what} {row[0]}"), row[1]) for row in await connection.fetch(query)]
    return [at.timestamp() - said for said, at in found if said is not None and at is not None]


def _rate(ended: Sequence[float]) -> float:
    """Rollouts a second between the first and the last tenth of them."""
    first, last = (ended[min(len(ended) - 1, int(share * len(ended)))] for share in RATE)
    return (RATE[1] - RATE[0]) * len(ended) / max(last - first, 1e-9)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {"n": 0, "p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
    place = {"p50_ms": ordered[len(ordered) // 2], "p99_ms": ordered[int(0.99 * (len(ordered) - 1))], "max_ms": ordered[-1]}
    return {"n": len(ordered), **{name: round(1000 * value, 1) for name, value in place.items()}}


def growth(rows: Sequence[Row], rollouts: int) -> dict[str, dict[str, float]]:
    """By process: memory and handles at both ends of the steady time, and CPU seconds for all of it."""
    steady = [row for row in rows if STEADY[0] * rollouts <= row["done"] <= STEADY[1] * rollouts]
    fifth = max(1, len(steady) // 5)
    found: dict[str, dict[str, float]] = {}
    for name in rows[0]["processes"]:
        spent = rows[-1]["processes"][name]["cpu_s"] - rows[0]["processes"][name]["cpu_s"]
        found[name] = {"cpu_s": round(spent, 1), "cpu_ms_per_rollout": round(1000 * spent / rollouts, 1)}
        for held in ("rss_mb", "handles", "threads"):
            values = [row["processes"][name][held] for row in steady] or [0]
            first, last = median(values[:fifth]), median(values[-fifth:])
            found[name] |= {f"{held}_first": first, f"{held}_last": last, f"{held}_growth": round(last - first, 2)}
    return found


def result(place: Mapping[str, Any], rows: Sequence[Row], times: Times, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The whole document. ``place``: what `from_ledger` found."""
    rollouts = sum(place["outcomes"].values())
    processes = growth(rows, rollouts)
    ours = {name: held for name, held in processes.items() if name.partition("-")[0] in ("orchestrator", "proxy", *REAL)}
    queues = {queue: max(row["queues"][queue] for row in rows) for queue in rows[0]["queues"]}
    figures = {
        "rollouts_per_s": place["rollouts_per_s"],
        "rss_growth_mb": max(held["rss_mb_growth"] for held in ours.values()),
        "p99_ms": max(place["transitions"][way]["p99_ms"] for way in OF_THE_LEDGER),
    }
    confirmed = place["outgoing"] + len(times.seconds["publish finished"]) + len(times.seconds["publish scored"])
    return {
        "figures": figures,
        "missed": _missed(figures, place, ours, queues, asked),
        "asked": dict(asked),
        "machine": _machine(),
        "rollouts": rollouts,
        "attempts": place["attempts"],
        "outcomes": place["outcomes"],
        "transactions_per_rollout": round(place["transactions"] / rollouts, 2),
        "rolled_back_per_rollout": round(place["rolled_back"] / rollouts, 2),
        "confirmed_messages_per_rollout": round(confirmed / rollouts, 2),
        "most_at_work": max(row["at_work"] for row in rows),
        "queue_depth_max": queues,
        "transitions": place["transitions"],
        "requests": {what: quantiles(values) for what, values in sorted(times.seconds.items())},
        "counts": dict(times.counts),
        "processes": processes,
        "rows": list(rows),
    }


def _missed(
    figures: Mapping[str, float],
    place: Mapping[str, Any],
    ours: Mapping[str, Mapping[str, float]],
    queues: Mapping[str, int],
    asked: Mapping[str, Any],
) -> list[str]:
    missed: list[str] = []
    if figures["rollouts_per_s"] < ROLLOUTS_PER_S and not asked["real"]:
        missed.append(f"rollouts_per_s is {figures['rollouts_per_s']}, not {ROLLOUTS_PER_S:g} or more")
    for name, held in ours.items():
        for what, bound in (("rss_mb", RSS_GROWTH_MB), ("handles", HANDLES_GROWTH)):
            if held[f"{what}_growth"] > bound:
                missed.append(f"{name}: {what} grew by {held[f'{what}_growth']:g}, not {bound:g} or less")
    bound = QUEUE_BOUND * asked["in_flight"]
    missed += [f"{queue}: {depth} messages waited, not {bound:g} or less" for queue, depth in queues.items() if depth > bound]
    if others := {outcome: number for outcome, number in place["outcomes"].items() if outcome != "finished"}:
        missed.append(f"outcomes other than finished: {others}")
    return missed


def table(document: Mapping[str, Any]) -> str:
    """Processes and transitions, for people."""
    lines = [f"{'process':<20} {'RSS MB':>8} {'growth':>8} {'handles':>8} {'growth':>8} {'CPU s':>8} {'CPU ms a rollout':>17}"]
    for name, held in document["processes"].items():
        lines.append(
            f"{name:<20} {held['rss_mb_last']:>8.1f} {held['rss_mb_growth']:>8.2f} {held['handles_last']:>8.0f}"
            f" {held['handles_growth']:>8.0f} {held['cpu_s']:>8.1f} {held['cpu_ms_per_rollout']:>17.1f}"
        )
    lines.append(f"{'':<24} {'n':>8} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}")
    for what, row in (document["transitions"] | document["requests"]).items():
        if not row["n"]:
            continue  # of real workers nothing says when they spoke
        lines.append(f"{what:<24} {row['n']:>8} {row['p50_ms']:>9.1f} {row['p99_ms']:>9.1f} {row['max_ms']:>9.1f}")
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return {"cpus": os.cpu_count(), "cpu": names[0] if names else "", "python": platform.python_version()}
