"""What a run looks like while it goes: one live table on a terminal, one line every ten seconds elsewhere.

Everything on the screen comes from ``GET /v1/runs/{id}``; the screen decides nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evener.api import ApiClient

POLL_S = 0.5
LINE_EVERY_S = 10.0
ENDED = ("done", "failed", "cancelled")


async def watch(api: ApiClient, run_id: str, console: Console, stop: asyncio.Event) -> dict[str, Any]:
    """Show a run until it ends or ``stop`` is set; the last state that was seen."""
    rate = Rate()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            return await _follow(api, run_id, stop, lambda run: live.update(screen(run, rate.of(run))))
    shown = Lines(console)
    return await _follow(api, run_id, stop, lambda run: shown.show(run, rate.of(run)))


async def _follow(api: ApiClient, run_id: str, stop: asyncio.Event, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    while True:
        run: dict[str, Any] = await api.get(f"/v1/runs/{run_id}")
        show(run)
        if run["state"] in ENDED or stop.is_set():
            return run
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await stop.wait()


class Rate:
    """Rollouts and sampled tokens a second over the last half minute, and the time that is left."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._seen: list[tuple[float, int, int]] = []

    def of(self, run: dict[str, Any]) -> dict[str, float | None]:
        """``tokens_s``, ``rollouts_s``, ``eta_s``; None where not known yet."""
        now = time.monotonic()
        done, total = progress_of(run)
        self._seen.append((now, run["rollouts"]["done"], run["sampled_tokens"]))
        self._seen = [row for row in self._seen if now - row[0] <= self._window_s]
        first = self._seen[0]
        seconds = now - first[0]
        if seconds < 1:
            return {"tokens_s": None, "rollouts_s": None, "eta_s": None}
        rollouts_s = (run["rollouts"]["done"] - first[1]) / seconds
        left = max(total - done, 0)
        return {
            "tokens_s": (run["sampled_tokens"] - first[2]) / seconds,
            "rollouts_s": rollouts_s,
            "eta_s": left / rollouts_s if rollouts_s > 0 else None,
        }


def progress_of(run: dict[str, Any]) -> tuple[int, int]:
    """Rollouts that ended and rollouts that the whole run is expected to take."""
    return run["rollouts"]["done"], max(run["expected"], run["rollouts"]["done"], 1)


def screen(run: dict[str, Any], rate: dict[str, float | None]) -> RenderableType:
    """The live screen of a run."""
    done, total = progress_of(run)
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(run["name"], style="bold"),
        Text(phase(run), style="cyan"),
        ProgressBar(total=total, completed=done, width=40),
        f"{done}/{total} rollouts",
        f"ETA {clock(rate['eta_s'])}",
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        f"running {run['rollouts']['running']}",
        f"version {run['version']}",
        staleness(run),
        f"{number(rate['tokens_s'])} tokens/s",
        f"{number(rate['rollouts_s'])} rollouts/s",
        outcomes(run),
    )
    return Group(head, facts, pass1_table(run))


def pass1_rows(run: dict[str, Any], purpose: str) -> list[dict[str, Any]]:
    """pass@1 by version over all harnesses, oldest first; ``families`` has each family's."""
    cells = [row for row in run["pass1"] if row["purpose"] == purpose and row["harness"] is None]
    return [
        row
        | {
            "families": {
                cell["family"]: cell["pass1"] for cell in cells if cell["family"] and cell["version"] == row["version"]
            }
        }
        for row in cells
        if row["family"] is None
    ]


def staleness(run: dict[str, Any]) -> str:
    """Mean and greatest staleness of the trained groups."""
    found = run["staleness"]
    return "staleness -" if found["mean"] is None else f"staleness {found['mean']:.1f} (max {found['max']})"


def pass1_table(run: dict[str, Any]) -> Table:
    """pass@1 by purpose and version, with its 95 % interval."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("", "version", "pass@1", "95 %", "rollouts", "families"):
        table.add_column(column)
    for row in [*pass1_rows(run, "eval"), *pass1_rows(run, "train")[-3:]]:
        families = "  ".join(f"{name} {value:.2f}" for name, value in sorted(row["families"].items()))
        table.add_row(
            row["purpose"],
            str(row["version"]),
            f"{row['pass1']:.3f}",
            f"{row['low']:.2f}-{row['high']:.2f}",
            str(row["n"]),
            families if row["purpose"] == "eval" else "",
        )
    return table


class Lines:
    """Progress for a log file: a line at each change of phase or version, and one every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ("", 0.0)

    def show(self, run: dict[str, Any], rate: dict[str, float | None]) -> None:
        """Print a line if it is time."""
        done, total = progress_of(run)
        now = time.monotonic()
        first = done > 0 and self._last[0] == ""
        if not first and self._last[0] == phase(run) and now - self._last[1] < LINE_EVERY_S:
            return
        if done == 0 and now - self._last[1] < LINE_EVERY_S:
            return
        self._last = (phase(run) if done else "", now)
        rows = [*pass1_rows(run, "eval"), *pass1_rows(run, "train")]
        last = max(rows, key=lambda row: row["version"]) if rows else None
        score = f"pass@1 {last['pass1']:.3f} ({last['purpose']}, version {last['version']})" if last else "no score yet"
        self._console.print(
            f"{phase(run):<16} {done}/{total} rollouts  {score}  {staleness(run)}  "
            f"{number(rate['tokens_s'])} tokens/s  ETA {clock(rate['eta_s'])}",
            highlight=False,
            soft_wrap=True,
        )


def phase(run: dict[str, Any]) -> str:
    """Where a run stands, for people."""
    if run["state"] != "running":
        return run["state"]
    return f"step {run['step']}/{run['steps']}" if run["phase"] == "train" else f"eval at version {run['version']}"


def outcomes(run: dict[str, Any]) -> str:
    """Counts by outcome."""
    return "  ".join(f"{name} {count}" for name, count in sorted(run["rollouts"]["outcomes"].items()) if count)


def clock(seconds: float | None) -> str:
    """Minutes and seconds."""
    return "-" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def number(value: float | None) -> str:
    """A rate for people."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
