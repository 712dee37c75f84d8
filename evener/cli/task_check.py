"""A task passes where its solution scores 1 and the workspace that nobody touched scores less, by the way rollouts are scored.

A declared range is mapped to [0, 1] by the verifier, so that 1 is the best of every task. Tasks are tried side by side, each
with sandboxes of its own; nothing of them stays. Called by `evener tasks check`.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evener.blobs import Blobs
from evener.cli.embedded import check_task
from evener.cli.output import cell
from evener.errors import InputError
from evener.messages import RolloutScored
from evener.sandbox import ExecResult, Kind, choose
from evener.settings import Settings
from evener.tasks import read_task


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one task; ``why`` it fails, "" where it passes. A malformed task has no scores."""

    folder: Path
    why: str
    solution: RolloutScored | None = None
    untouched: RolloutScored | None = None


@dataclass(frozen=True, slots=True)
class Checks:
    """What came of all tasks, in ``seconds`` of wall time."""

    verdicts: Sequence[Verdict]
    sandbox: Kind
    seconds: float

    @property
    def passed(self) -> int:
        """How many tasks pass."""
        return sum(not verdict.why for verdict in self.verdicts)

    @property
    def totals(self) -> dict[str, Any]:
        """Counts of tasks, and the pace; each task is scored twice."""
        scored = [score for verdict in self.verdicts for score in (verdict.solution, verdict.untouched) if score]
        return {
            "tasks": len(self.verdicts),
            "passed": self.passed,
            "solution": sum(_solved(verdict.solution) for verdict in self.verdicts),
            "untouched": sum(_solved(verdict.untouched) for verdict in self.verdicts),
            "out_of_process": sum(_tier(verdict.solution) == "out_of_process" for verdict in self.verdicts),
            "sandbox": self.sandbox,
            "seconds": round(self.seconds, 1),
            "scores_a_minute": round(60 * len(scored) / self.seconds, 1),
        }

    def print(self, console: Console) -> None:
        """A line a failing task, and one of totals."""
        for verdict in self.verdicts:
            if verdict.why:
                console.print(f"{verdict.folder.name}: {verdict.why}", markup=False, soft_wrap=True)
        totals = self.totals
        number = totals["tasks"]
        console.print(
            f"{self.passed} of {number} tasks pass; the solution scores 1 in {totals['solution']} of {number}, the untouched"
            f" workspace in {totals['untouched']} of {number} ({totals['out_of_process']} graded out of process,"
            f" {totals['seconds']} s, {totals['scores_a_minute']} scores a minute, sandbox {self.sandbox})",
            soft_wrap=True,
        )


def report(checks: Checks) -> dict[str, Any]:
    """All that is known, as a JSON document."""
    return {
        **checks.totals,
        "checks": [
            {
                "task": verdict.folder.name,
                "folder": str(verdict.folder),
                "passed": not verdict.why,
                "why": verdict.why,
                "solution": _scored(verdict.solution),
                "untouched": _scored(verdict.untouched),
            }
            for verdict in checks.verdicts
        ],
    }


async def check_all(folders: Sequence[Path], *, jobs: int, settings: Settings, console: Console) -> Checks:
    """Check task directories, ``jobs`` at once. Raises InputError where the sandbox that the settings name does not work."""
    sandbox = await choose("auto", trusted=True, host=settings.sandbox)
    started = time.monotonic()
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    turns = asyncio.Semaphore(jobs)
    with tempfile.TemporaryDirectory() as root, screen as progress:
        bar = progress.add_task("checking", total=len(folders))

        async def check(folder: Path) -> Verdict:
            async with turns:
                verdict = await _check(folder, Path(root), settings)
            progress.advance(bar)
            return verdict

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(check(folder)) for folder in folders]
    return Checks([task.result() for task in tasks], sandbox, time.monotonic() - started)


async def _check(folder: Path, root: Path, settings: Settings) -> Verdict:
    try:
        task = await asyncio.to_thread(read_task, folder)
        solution, untouched, solved = await check_task(task, Blobs(root / "blobs"), root / "sandboxes", settings)
    except InputError as error:
        return Verdict(folder, error.detail)
    return Verdict(folder, _why(solution, untouched, solved), solution, untouched)


def _why(solution: RolloutScored, untouched: RolloutScored, solved: ExecResult | None) -> str:
    if solution.cause is not None:
        return f"solution: {solution.cause}: {solution.detail}"
    best, least = solution.scores["reward"], untouched.scores.get("reward")
    if best < 1:
        return f"solution: scores {cell(best)}, not 1{_ended(solved)}{_short(solution)}"
    if untouched.cause is not None:
        return f"untouched: {untouched.cause}: {untouched.detail}"
    if least is None or least >= best:
        return f"untouched: scores {cell(least)} as the solution does"
    return ""


def _ended(solved: ExecResult | None) -> str:
    """How a solution ended that may be the reason of its score."""
    if solved is None or (solved.exit_code == 0 and not solved.timed_out):
        return ""
    how = "ran out of time" if solved.timed_out else f"ended with {solved.exit_code}"
    return f"; solve.sh {how}{_last_line(solved.stderr.decode(errors='replace'))}"


def _gradings(scored: RolloutScored) -> list[dict[str, Any]]:
    """The evidence of each grading: of all steps of a task, or of the one that there is."""
    return scored.evidence.get("steps", [scored.evidence])


def _short(scored: RolloutScored) -> str:
    """The first step that does not get the best, and what was seen of it."""
    for seen in _gradings(scored):
        rewards = seen.get("scores", scored.scores)
        if rewards.get("reward", 0) < 1:
            step = f"; step {seen['name']}: scores {cell(rewards.get('reward'))}" if "name" in seen else ""
            return f"{step}{_tampered(seen)}{_said(seen)}"
    return ""


def _tampered(evidence: dict[str, Any]) -> str:
    """What of the solution was taken for tampering, which makes a score 0."""
    seen = [finding["detail"] for finding in evidence.get("findings", ()) if finding["tampering"]]
    return f"; taken for tampering: {seen[0]}" if seen else ""


def _said(evidence: dict[str, Any]) -> str:
    """The last that the tests said."""
    line = _last_line(evidence.get("stderr") or "") or _last_line(evidence.get("stdout") or "")
    return f"; tests{line}" if line else ""


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


def _tier(scored: RolloutScored | None) -> str | None:
    return None if scored is None else scored.evidence.get("tier")


def _solved(scored: RolloutScored | None) -> bool:
    return scored is not None and scored.cause is None and scored.scores["reward"] >= 1


def _scored(scored: RolloutScored | None) -> dict[str, Any] | None:
    names = ("scores", "cause", "detail", "evidence", "seconds")
    return None if scored is None else {name: getattr(scored, name) for name in names}
