"""What each process holds, and what waits in each queue, once a second for as long as the load lasts: one row a look.

A store is weighed with its children (Postgres has one a connection): memory is what is its own (RssAnon), without the
pages that it shares with others, which fill up to a size that is configured. Run by `bench.load`.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.load.place import POLICY
from evener.bus import Bus
from evener.messages import EVENTS, ROLLOUTS, WORKSPACES, train_queue

EVERY_S = 1.0
FAMILIES = ("postgres", "rabbitmq", "redis")
QUEUES = (ROLLOUTS, WORKSPACES, EVENTS, train_queue(POLICY))
Row = dict[str, Any]
_TICK = os.sysconf("SC_CLK_TCK")


class Watch:
    """The rows, which grow while `run` runs. ``done``: rollouts that have their outcome; ``at_work``: work of the workers."""

    def __init__(self, pids: dict[str, int], bus: Bus, at_work: Callable[[], int]) -> None:
        self._pids = {**pids, "workers (scripted)": os.getpid()}
        self._bus = bus
        self._at_work = at_work
        self.done = 0
        self.rows: list[Row] = []

    async def run(self) -> None:
        """Look, once a second, for ever."""
        began = time.monotonic()
        while True:
            children = await asyncio.to_thread(_children)
            row: Row = {
                "s": round(time.monotonic() - began, 1),
                "done": self.done,
                "at_work": self._at_work(),
                "processes": {name: _weigh(pid, children if name in FAMILIES else {}) for name, pid in self._pids.items()},
                "queues": {queue: await self._bus.depth(queue) for queue in QUEUES},
            }
            self.rows.append(row)
            await asyncio.sleep(EVERY_S)


def _weigh(pid: int, children: dict[int, list[int]]) -> Row:
    family = [pid, *children.get(pid, [])]
    rows = [row for member in family if (row := _one(member)) is not None]
    return {
        "rss_mb": round(sum(row["rss_mb"] for row in rows), 2),
        "handles": sum(row["handles"] for row in rows),
        "threads": sum(row["threads"] for row in rows),
        "cpu_s": round(sum(row["cpu_s"] for row in rows), 2),
    }


def _one(pid: int) -> Row | None:
    place = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        handles = len(os.listdir(place / "fd"))  # noqa: PTH208 - only the number is wanted
    except (OSError, ValueError):
        return None  # it has ended
    return {
        "rss_mb": int(status.get("RssAnon", "0 kB").split()[0]) / 1024,
        "handles": handles,
        "threads": int(status.get("Threads", "0")),
        "cpu_s": (int(fields[11]) + int(fields[12])) / _TICK,
    }


def _children() -> dict[int, list[int]]:
    """All descendants of each process."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: dict[int, list[int]] = {}
    for pid in parents:
        above = parents.get(pid)
        while above:
            found.setdefault(above, []).append(pid)
            above = parents.get(above)
    return found
