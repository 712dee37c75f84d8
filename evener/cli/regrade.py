"""`evener rollouts regrade`: snapshots are graded again by the verifiers of now, and old and new scores shown side by side.

A stack that runs (of EVENER_URL, or in this folder) does it with its own verifiers, and goes on where this command is stopped;
over a ledger at rest a verifier runs here until all is graded. No score that counted and no reward is changed.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evener.api import ApiClient
from evener.cli.connect import connect, running_stack
from evener.cli.embedded import regrading
from evener.cli.output import cell, out, print_table
from evener.settings import Settings

POLL_S = 0.5

Row = dict[str, Any]


async def regrade(settings: Settings, given: str, console: Console) -> dict[str, Any]:
    """Have what ``given`` means graded again and wait for it: ``{"kind", "id", "rollouts", "left_out", "regrades": [...]}``."""
    async with _verifiers(settings) as (api, raise_fault):
        asked: dict[str, Any] = await api.post("/v1/regrades", {"of": given})
        columns = (TextColumn("grading again"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("grading again", total=asked["rollouts"])
            while True:
                rows: list[Row] = await api.get("/v1/regrades", of=asked["id"])
                waiting = sum(row["new"] is None for row in rows)
                progress.update(bar, completed=asked["rollouts"] - waiting)
                if not waiting:
                    return asked | {"regrades": rows}
                raise_fault()
                await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def _verifiers(settings: Settings) -> AsyncGenerator[tuple[ApiClient, Callable[[], None]]]:
    """The API of a stack that has verifiers, and what raises the fault of one that ran here."""
    at_rest = not settings.url and running_stack(settings.data) is None and (settings.data / "ledger.db").exists()
    if not at_rest:
        async with connect(settings) as api:
            yield api, lambda: None
        return
    async with regrading(settings) as stack, ApiClient(stack.settings.api, stack.settings.api_token.get_secret_value()) as api:
        yield api, stack.raise_fault


def show(document: dict[str, Any]) -> None:
    """The scores side by side, what changed first; then a line of counts."""
    rows: Sequence[Row] = sorted(document["regrades"], key=lambda row: _change(row) == "same")
    columns = ["rollout_id", "task_id", "harness", "trained", "old", "new", "change"]
    print_table([row | {"old": _shown(row["old"]), "new": _shown(row["new"]), "change": _change(row)} for row in rows], columns)
    counts = {word: sum(_change(row) == word for row in rows) for word in ("same", "higher", "lower", "no score")}
    out.print(
        f"{len(rows)} graded again: "
        + ", ".join(f"{word} {count}" for word, count in counts.items())
        + f"; left out {document['left_out']} (no snapshot that was scored); scores and rewards that counted stay as they were",
        soft_wrap=True,
    )


def failed(document: dict[str, Any]) -> int:
    """How many got no score this time."""
    return sum(_change(row) == "no score" for row in document["regrades"])


def _change(row: Row) -> str:
    old, new = (None if said is None else said["score"] for said in (row["old"], row["new"]))
    if new is None:
        return "no score"
    if old is None:
        return "higher"
    return "same" if new == old else "higher" if new > old else "lower"


def _shown(said: dict[str, Any] | None) -> str:
    """A score, or what prevented it."""
    if said is None:
        return "-"
    return cell(said["score"]) if said["cause"] is None else str(said["cause"])
