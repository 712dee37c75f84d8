"""From rows to figures: medians over the repetitions, ratios of medians, and which targets they miss."""

import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
_KEYS = ("dialect", "tokens", "clients")
_MEASURED = ("cpu_ms", "calls_s", "redis_cpu_ms", "wait_p50_ms", "wait_p99_ms", "health_p99_ms", "rss_mb")

LEAST = {"cpu_ratio_500": 5.0, "cpu_ratio_8k": 8.0, "calls_ratio_256": 5.0, "inflight_peak": 2000}
MOST = {"health_p99_ms": 50.0, "lost_on_kill": 0}
"""The targets; ratios are theirs to ours, or ours to theirs where more is better."""


def result(rows: list[Row], checked: dict[str, Row], *, began: float, seconds: float, repetitions: int) -> Row:
    """The whole document: figures, what they miss, medians by case, and the rows they come from."""
    cases = _cases(rows)
    figures = _figures(cases, checked)
    return {
        "figures": figures,
        "missed": _missed(figures, rows, checked),
        "machine": _machine(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": seconds,
        "repetitions": repetitions,
        "cases": cases,
        "checks": checked,
        "rows": rows,
    }


def table(cases: list[Row]) -> str:
    """The medians, for people."""
    lines = [
        "| dialect | prompt | clients | OpenEnv ms CPU | Evener ms CPU | ratio (theirs without export) | Redis ms CPU |"
        " OpenEnv calls/s | Evener calls/s | health p99 ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        theirs, ours = case["openenv"], case["evener"]
        bare = f" ({case['cpu_ratio_without_export']:.1f})" if case["cpu_ratio_without_export"] else ""
        cells = (
            f"{theirs['cpu_ms']:.2f} | {ours['cpu_ms']:.2f} | {case['cpu_ratio']:.1f}{bare} | {ours['redis_cpu_ms']:.2f}"
            f" | {theirs['calls_s']:.0f} | {ours['calls_s']:.0f} | {theirs['health_p99_ms']:.0f} / {ours['health_p99_ms']:.0f}"
        )
        sync = "" if case["fsync"] == "everysec" else f" (fsync {case['fsync']})"
        lines.append(f"| {case['dialect']}{sync} | {case['tokens']} | {case['clients']} | {cells} |")
    return "\n".join(lines)


def _cases(rows: list[Row]) -> list[Row]:
    """One entry a case and kind of fsync, with the medians of both sides."""
    cases: list[Row] = []
    for key in dict.fromkeys((*(row[name] for name in _KEYS), row["fsync"]) for row in rows if row["fsync"]):
        *names, fsync = key
        same = [row for row in rows if [row[name] for name in _KEYS] == names]
        theirs = _medians([row for row in same if row["side"] == "openenv"])
        ours = _medians([row for row in same if row["fsync"] == fsync])
        bare = [row["cpu_ms"] for row in same if row["side"] == "openenv without export"]
        cases.append(
            dict(zip(_KEYS, names, strict=True))
            | {"fsync": fsync, "openenv": theirs, "evener": ours}
            | {"cpu_ratio": round(theirs["cpu_ms"] / ours["cpu_ms"], 2)}
            | {"cpu_ratio_without_export": round(median(bare) / ours["cpu_ms"], 2) if bare else None}
            | {"calls_ratio": round(ours["calls_s"] / max(theirs["calls_s"], 0.1), 2)}
        )
    return cases


def _medians(rows: list[Row]) -> Row:
    return {name: round(median(row[name] for row in rows), 3) for name in _MEASURED if rows[0][name] is not None}


def _figures(cases: list[Row], checked: dict[str, Row]) -> Row:
    def case(tokens: int, clients: int) -> Row:
        key = {"dialect": "chat", "tokens": tokens, "clients": clients, "fsync": "everysec"}
        return next(case for case in cases if key.items() <= case.items())

    return {
        "cpu_ratio_500": case(500, 32)["cpu_ratio"],
        "cpu_ratio_8k": case(8000, 32)["cpu_ratio"],
        "calls_ratio_256": case(500, 256)["calls_ratio"],
        "health_p99_ms": case(500, 256)["evener"]["health_p99_ms"],
        "inflight_peak": checked["inflight"]["peak"],
        "rss_mb_10k_sessions": checked["sessions"]["rss_mb"],
        "lost_on_kill": checked["kill"]["lost"],
    }


def _missed(figures: Row, rows: list[Row], checked: dict[str, Row]) -> list[str]:
    """A line for each target that is missed, and for each call that ended otherwise than it should."""
    missed = [f"{name} is {figures[name]}, not {bound} or more" for name, bound in LEAST.items() if figures[name] < bound]
    missed += [f"{name} is {figures[name]}, not {bound} or less" for name, bound in MOST.items() if figures[name] > bound]
    missed += [f"{name}: {check['refused']} calls were refused" for name, check in checked.items() if check.get("refused")]
    if not checked["kill"]["whole"]:
        missed.append("no reply was whole before the kill")
    failed = [f"{row['side']}: {row['failures']}" for row in rows if row["failures"]]
    return missed + failed


def _machine() -> Row:
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
