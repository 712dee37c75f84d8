"""``make test-tamper``: every attack and every honest solution through the snapshot path and both tiers of the verifier.

Prints one line for each that was not as it should be, and at last ``test-tamper: attacks= forged_out_of_process=
forged_in_process= honest_ok=``; writes .out/test-tamper.json. Exit code 0: nothing forged out of process, nothing ours failed,
and every honest solution right. ``ONLY`` (a part of names) selects; ``--docs`` writes the table of docs/verifier.md.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evener.api import ScoreOrder
from evener.blobs import Blobs
from evener.ids import new_id, session_id
from evener.messages import RolloutScored
from evener.sandbox import snapshot
from evener.sandbox.probe import bubblewrap_missing
from evener_verifier import verifier
from tests.tamper.attacks import ATTACKS
from tests.tamper.honest import SOLUTIONS
from tests.tamper.workspace import PRISTINE, Attempt, tests, toml
from tests.tars import tar

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("out_of_process", "in_process")
TOOLS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
AT_ONCE = 3
FENCE = "<!-- test-tamper -->"


def make_root(folder: Path) -> None:
    """What graders find at /opt/grader: pytest, as `pip install --user` would have put it."""
    version = subprocess.run(
        [
            "/usr/bin/env",
            "-i",
            "PATH=/usr/local/bin:/usr/bin:/bin",
            "python3",
            "-c",
            "import sys; print('%d.%d' % sys.version_info[:2])",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    place = folder / f"lib/python{version}/site-packages"
    place.mkdir(parents=True)
    for name in TOOLS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            shutil.copytree(
                next(iter(spec.submodule_search_locations)), place / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif spec is not None and spec.origin:
            shutil.copy(spec.origin, place)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


class Range:
    """Scores attempts."""

    def __init__(self, place: Path, root: Path) -> None:
        self._place, self._root = place, root
        self._blobs = Blobs(place / "blobs")
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def score(self, attempt: Attempt, tier: str) -> RolloutScored:
        """Make the workspace, take its snapshot as a runner does, and have it scored as an order of the ledger."""
        async with self._slots:
            order = await asyncio.to_thread(self._order, attempt, tier)
            return await verifier.score(order, self._blobs, self._place / "sandboxes", root=self._root)

    def _order(self, attempt: Attempt, tier: str) -> ScoreOrder:
        with tempfile.TemporaryDirectory(dir=self._place) as folder:
            attempt.lay_out(Path(folder))
            taken = snapshot.take(Path(folder), "/workspace")
        table = {"task.toml": toml(tier)}
        agent = {f"environment/workspace/{name}": text.encode() for name, text in PRISTINE.items()}
        return ScoreOrder(
            session_id=session_id(new_id(), 1),
            task_id=attempt.name,
            snapshot=self._blobs.put("snapshots", taken.tar),
            agent_bundle=self._blobs.put("agent", tar(table | agent)),
            grader_bundle=self._blobs.put("grader", tar(table | tests(tier, attempt.runner))),
            trusted=False,
            sandbox="bubblewrap",
        )


def told(scored: RolloutScored) -> dict[str, Any]:
    """What one scoring came to."""
    kinds = [each["kind"] for each in scored.evidence.get("findings", []) if each["tampering"]]
    return {
        "score": scored.scores.get("reward"),
        "cause": scored.cause,
        "seen": sorted(set(kinds)),
        "seconds": round(scored.seconds, 2),
    }


async def run(only: str) -> dict[str, Any]:
    """All of it."""
    attacks = [each for each in ATTACKS if only in each.name]
    honest = [each for each in SOLUTIONS if only in each[0].name]
    with tempfile.TemporaryDirectory(prefix="evener-tamper-") as name:
        place = Path(name)
        place.chmod(0o755)
        await asyncio.to_thread(make_root, place / "root")
        shooting = Range(place, place / "root")
        pairs = [(attempt, tier) for attempt in (*attacks, *(each for each, _ in honest)) for tier in TIERS]
        scored = await asyncio.gather(*(shooting.score(*pair) for pair in pairs))
        results = {(attempt.name, tier): each for (attempt, tier), each in zip(pairs, scored, strict=True)}
    rows = [
        {"attack": each.name, "what": each.what, **{tier: told(results[each.name, tier]) for tier in TIERS}} for each in attacks
    ]
    wanted = [
        {"solution": each.name, "deserves": score, **{tier: told(results[each.name, tier]) for tier in TIERS}}
        for each, score in honest
    ]
    details = {f"{name}, {tier}": each for (name, tier), each in results.items()}
    return {"attacks": rows, "honest": wanted, "results": details}


def main() -> int:
    """Run it; the exit code is the verdict."""
    os.chdir(ROOT)
    started = time.monotonic()
    missing = asyncio.run(bubblewrap_missing())
    if missing is not None:
        print(f"test-tamper: bubblewrap does not work here, and nothing else keeps a candidate from its score: {missing}")
        return 1
    seen = asyncio.run(run(os.environ.get("ONLY", "")))
    faults = [line for row in seen["attacks"] for line in _faults_of_attack(row)]
    right = [row for row in seen["honest"] if all(row[tier]["score"] == row["deserves"] for tier in TIERS)]
    faults += [f"honest: {row}" for row in seen["honest"] if row not in right]
    forged = {tier: sum((row[tier]["score"] or 0) > 0 for row in seen["attacks"]) for tier in TIERS}
    summary = {"attacks": len(seen["attacks"]), **{f"forged_{tier}": forged[tier] for tier in TIERS}, "honest_ok": len(right)}
    for line in faults:
        print(line)
        name = os.environ.get("ONLY", "")
        for tier in TIERS if os.environ.get("ONLY") else ():
            print(json.dumps(seen["results"].get(f"{name}, {tier}") and seen["results"][f"{name}, {tier}"].evidence, indent=1))
    (ROOT / ".out").mkdir(exist_ok=True)
    ok = not faults
    seconds = round(time.monotonic() - started, 1)
    report = {
        "ok": ok,
        **summary,
        "honest": len(seen["honest"]),
        "seconds": seconds,
        "each": seen["attacks"],
        "solutions": seen["honest"],
    }
    (ROOT / ".out/test-tamper.json").write_text(json.dumps(report, indent=1) + "\n")
    if "--docs" in sys.argv:
        _write_docs(seen["attacks"])
    print("test-tamper: " + " ".join(f"{name}={value}" for name, value in summary.items()))
    return 0 if ok else 1


def _faults_of_attack(row: dict[str, Any]) -> list[str]:
    """A forged score out of process, and a fault of ours in either tier."""
    faults: list[str] = []
    if (row["out_of_process"]["score"] or 0) > 0:
        faults.append(f"FORGED out of process: {row['attack']}")
    for tier in TIERS:
        if row[tier]["cause"] in ("sandbox_failed", "verifier_failed", "blob_missing"):
            faults.append(f"{tier}: {row['attack']}: {row[tier]['cause']}, which an agent must not bring about")
    return faults


def _write_docs(rows: list[dict[str, Any]]) -> None:
    file = ROOT / "docs/verifier.md"
    head, _, rest = file.read_text().partition(FENCE)
    tail = rest.partition(FENCE)[2]
    lines = ["| attack | is | out of process | in process |", "|---|---|---|---|"]
    lines += [f"| {row['attack']} | {row['what']} | {_cell(row[TIERS[0]])} | {_cell(row[TIERS[1]])} |" for row in rows]
    file.write_text(head + FENCE + "\n" + "\n".join(lines) + "\n" + FENCE + tail)


def _cell(told: dict[str, Any]) -> str:
    if told["score"] is None:
        return f"`{told['cause']}`"
    if told["score"] > 0:
        return f"**forged: {told['score']:g}**"
    return "0, tampering: " + ", ".join(told["seen"]) if told["seen"] else "0"


if __name__ == "__main__":
    sys.exit(main())
