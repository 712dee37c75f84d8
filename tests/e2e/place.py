"""The real command on the real example, with the real agent from npm: each test has its own data folder and ports."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evener.cli.connect import connect
from evener.settings import Settings
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "first-run"
HELD_OUT_STEP = 6
"""Every so many of the held-out tasks, which are ordered by family."""


@dataclass
class Place:
    """A data folder with ports of its own, and the `evener` command in it."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(4))

    @property
    def environment(self) -> dict[str, str]:
        names = ("EVENER_API_PORT", "EVENER_PROXY_PORT", "EVENER_ADMIN_PORT", "EVENER_ENGINE_PORT")
        own = dict(zip(names, map(str, self.ports), strict=True))
        return os.environ | own | {"EVENER_DATA": str(self.folder / "data"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "evener.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )

    def evener(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        child = self.start(*arguments)
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            pytest.fail(f"evener {' '.join(arguments)} took more than {timeout} s:\n{err[-3000:]}")
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    def json(self, *arguments: str):
        done = self.evener(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ask(self, *paths: str) -> list[Any]:
        """What the API says of the ledger at rest, without a process for each question."""

        async def answers() -> list[Any]:
            async with connect(Settings(data=self.folder / "data")) as api:
                return [await api.get(path) for path in paths]

        return asyncio.run(answers())

    def leftovers(self) -> list[str]:
        """Processes that this place's commands started and that are still there."""
        mark = str(self.folder).encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if mark in text and state != "Z" and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


def some_tasks(folder: Path) -> Path:
    """A few of the example's held-out tasks: each costs two agents' time, before training and after."""
    tasks = folder / "held-out"
    if not tasks.exists():
        for source in sorted((EXAMPLE / "tasks/held-out").iterdir())[::HELD_OUT_STEP]:
            shutil.copytree(source, tasks / source.name)
    return tasks


def run_file(folder: Path, **changes: str) -> Path:
    """A small run on the example: ``changes`` replaces whole lines by key."""
    lines = {
        "name": f'name = "{changes.pop("run", "small")}"',
        "policy": f'policy = "{EXAMPLE / "tiny-policy"}"',
        "tasks": f'tasks = "{EXAMPLE / "tasks/train"}"',
        "harness": '[[harness]]\nname = "pi"',
        "rollouts": "[rollouts]\ngroup_size = 4\nconcurrent = 8",
        "budget": "[budget]\ncalls = 6\nsampled_tokens = 600\nwall_s = 60",
        "train": "[train]\nsteps = 2\ngroups_per_step = 2\nlearning_rate = 1e-3\nmax_staleness = 2",
        "eval": f'[eval]\ntasks = "{some_tasks(folder)}"\nevery = 0\ngroup_size = 1',
    } | changes
    path = folder / "run.toml"
    path.write_text("\n".join(lines.values()) + "\n")
    return path
