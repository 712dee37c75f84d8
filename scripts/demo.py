"""`make demo`: evaluate the tiny policy on held-out tasks, train it inside the unmodified agent, evaluate it again.

Prints one line ``demo: pass1_before= pass1_after= ...`` and writes it to .out/demo.json; the exit code is 0 when no rollout
was lost and the pass rate rose with disjoint 95 % intervals (``--short``: when no rollout was lost).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "first-run"


def main() -> int:
    """Run the demo; the exit code is the verdict."""
    arguments = _arguments()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        file = _run_file(Path(folder), arguments.short, arguments.seed)
        command = [sys.executable, "-m", "evener.cli.main", "run", str(file), "--json"]
        code, output = _run([*command, *(["--new"] if arguments.new else [])])
    if not output:
        return code or 1
    run = json.loads(output)
    if run["state"] != "done":  # stopped, and said so: there is nothing to report yet
        return code or 1
    report = _report(run)
    print("demo: " + " ".join(f"{name}={value}" for name, value in report.items()))
    (ROOT / ".out").mkdir(exist_ok=True)
    (ROOT / ".out" / "demo.json").write_text(json.dumps(report | {"pass1": run["pass1"]}, indent=2) + "\n")
    print("see one rollout, token by token:  .venv/bin/evener rollouts show latest --trace")
    print("query the ledger:                 .venv/bin/evener sql 'select * from harness_matrix'")
    print("once more from the start:         make demo DEMO=--new")
    better = _interval(run, first=False)[0] > _interval(run, first=True)[1]
    return 0 if report["lost"] == 0 and (better or arguments.short) else 1


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and output of a command, which is told to stop where we are."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: child.terminate())
        output, _ = child.communicate()
    return child.returncode, output


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true", help="start again instead of resuming")
    parser.add_argument("--short", action="store_true", help="two steps, to see that everything works")
    parser.add_argument("--seed", type=int, help="another seed than the run file's")
    return parser.parse_args()


def _run_file(folder: Path, short: bool, seed: int | None) -> Path:
    """The example's run file, or one that differs from it in steps or seed, with a name of its own."""
    path = EXAMPLE / "run.toml"
    if not short and seed is None:
        return path
    document = tomllib.loads(path.read_text())
    text = path.read_text()
    name = document["name"] + ("-short" if short else "") + (f"-seed{seed}" if seed is not None else "")
    text = text.replace(f'name = "{document["name"]}"', f'name = "{name}"', 1)
    for key in (document["policy"], document["tasks"], document["eval"]["tasks"]):
        text = text.replace(f'"{key}"', f'"{EXAMPLE / key}"')
    if short:
        text = text.replace(f"steps = {document['train']['steps']}", "steps = 2", 1)
        text = text.replace(f"group_size = {document['eval']['group_size']}", "group_size = 1")
    if seed is not None:
        text = text.replace("[train]\n", f"[train]\nseed = {seed}\n", 1)
    changed = folder / "run.toml"
    changed.write_text(text)
    return changed


def _interval(run: dict, *, first: bool) -> tuple[float, float]:
    row = _eval_row(run, first=first)
    return (row["low"], row["high"]) if row else (0.0, 0.0)


def _eval_row(run: dict, *, first: bool) -> dict | None:
    rows = [row for row in run["pass1"] if row["purpose"] == "eval" and row["harness"] is None and row["family"] is None]
    return (rows[0] if first else rows[-1]) if rows else None


def _report(run: dict) -> dict:
    before, after = _eval_row(run, first=True), _eval_row(run, first=False)
    seconds = (run["ended"] or run["started"] or 0) - (run["started"] or 0)
    return {
        "pass1_before": round(before["pass1"], 3) if before else None,
        "pass1_after": round(after["pass1"], 3) if after else None,
        "rollouts": run["rollouts"]["done"],
        "lost": run["rollouts"]["outcomes"]["infra_error"],
        "harnesses": ",".join(run["harnesses"]),
        "sandbox": ",".join(run["sandboxes"]),
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
