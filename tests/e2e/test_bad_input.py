"""Bad input gives one clear line that names cause and remedy, and leaves nothing behind."""

import shutil
import socket
import sqlite3
from pathlib import Path

import pytest

from tests.e2e.place import EXAMPLE, Place, run_file

pytestmark = pytest.mark.e2e


def fails(place: Place, file: Path, code: int, *says: str) -> None:
    done = place.evener("run", str(file), timeout=120)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if line.startswith("evener: ")]
    assert len(lines) == 1, done.stderr
    for text in says:
        assert text in lines[0]
    assert "Traceback" not in done.stderr
    assert place.leftovers() == []
    ledger = place.folder / "data" / "ledger.db"
    if ledger.exists():
        assert sqlite3.connect(ledger).execute("select count(*) from runs").fetchone() == (0,)
    sandboxes = place.folder / "data" / "sandboxes"
    assert not sandboxes.exists() or list(sandboxes.iterdir()) == []


def test_a_broken_task(place):
    tasks = place.folder / "tasks"
    shutil.copytree(EXAMPLE / "tasks/train", tasks)
    broken = next(p for p in sorted(tasks.iterdir()) if p.is_dir())
    (broken / "task.toml").write_text("[verifier]\ntimeout_sec = 'soon'\n")
    file = run_file(place.folder, tasks=f'tasks = "{tasks}"')
    fails(place, file, 2, f"{broken.name}/task.toml", "verifier.timeout_sec", "mend the named file and field")


def test_an_unknown_key(place):
    file = run_file(place.folder, rollouts="[rollouts]\ngrup_size = 4")
    fails(place, file, 2, str(file), "rollouts.grup_size", "did you mean 'group_size'?")


def test_an_unknown_harness(place):
    fails(place, run_file(place.folder, harness='[[harness]]\nname = "pie"'), 2, "'pie'", "known: pi", "harnesses ls")


def test_a_policy_without_tokenizer(place):
    policy = place.folder / "policy"
    shutil.copytree(EXAMPLE / "tiny-policy", policy)
    (policy / "tokenizer.json").unlink()
    fails(place, run_file(place.folder, policy=f'policy = "{policy}"'), 2, str(policy), "no tokenizer")


@pytest.mark.parametrize("number", range(4), ids=["api", "proxy", "admin", "engine"])
def test_an_occupied_port(place, number: int):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", place.ports[number]))
        other.listen()
        variable = ["EVENER_API_PORT", "EVENER_PROXY_PORT", "EVENER_ADMIN_PORT", "EVENER_ENGINE_PORT"][number]
        fails(place, run_file(place.folder), 2, str(place.ports[number]), variable)
    assert not (place.folder / "data" / "logs" / "engine.log").exists()  # said before the engine was started


def test_an_engine_that_cannot_start(place):
    policy = place.folder / "policy"
    shutil.copytree(EXAMPLE / "tiny-policy", policy)
    (policy / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    fails(
        place, run_file(place.folder, policy=f'policy = "{policy}"'), 1, "the engine", "model.layers.0", "see the engine's log"
    )


def test_nothing_to_read_yet(place):
    done = place.evener("runs", "ls")
    assert done.returncode == 2
    assert "start with `evener run FILE`" in done.stderr
