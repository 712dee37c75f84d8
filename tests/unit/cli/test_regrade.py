"""`evener rollouts regrade`: over a ledger at rest a verifier grades here, a stack that runs uses its own."""

import asyncio
import io
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from rich.console import Console

from evener.blobs import Blobs
from evener.cli import output, regrade
from evener.errors import InputError, Outcome
from evener.settings import Settings
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.states import GroupState, RolloutState
from tests.tars import tar
from tests.unit.orchestrator.rows import a_group, a_rollout, a_run, a_score, a_task, an_attempt, write
from tests.unit.orchestrator.world import TOKEN, Workers, World, everyone, run_file, verifier

RUN, GROUP = "00000000-0000-7000-8000-00000000000a", "00000000-0000-7000-8000-0000000000b0"
ROLLOUTS = [f"00000000-0000-7000-8000-0000000000c{number}" for number in range(4)]
TEST = b"[ -f /workspace/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
QUIET = Console(file=io.StringIO())


@pytest.fixture
async def at_rest(tmp_path: Path) -> Settings:
    """A running run that was left alone: a trained group whose scores were all wrong, and a rollout that waits for a runner."""
    settings = Settings(data=tmp_path / "data", sandbox="process")
    blobs = Blobs(settings.blobs)
    agent = blobs.put("agent", tar({"task.toml": b"", "instruction.md": b"Do it.", "environment/workspace/given": b""}))
    grader = blobs.put("grader", tar({"task.toml": b"", "tests/test.sh": TEST}))
    left = [blobs.put("snapshots", tar(files)) for files in ({"done": b""}, {"other": b""})]
    scored = {"state": RolloutState.SCORED, "outcome": Outcome.FINISHED, "score": 0.0, "reward": 0.5}
    ledger = Ledger(settings.database)
    await migrate(ledger)
    await write(
        ledger,
        [a_run("r", id=RUN, file=run_file(rollouts={"sandbox": "process"})), a_task(agent_bundle=agent, grader_bundle=grader)],
        [a_group(GROUP, RUN, state=GroupState.TRAINED), a_group("open", RUN, number=1)],
        [a_rollout(name, GROUP, RUN, **scored) for name in ROLLOUTS[:2]]
        + [a_rollout(ROLLOUTS[2], "open", RUN), a_rollout(ROLLOUTS[3], "open", RUN, state=RolloutState.PLANNED, attempt=0)],
        [an_attempt(name, snapshot=snapshot) for name, snapshot in zip(ROLLOUTS, left, strict=False)]
        + [an_attempt(ROLLOUTS[2])],
        [a_score(name, 0.0) for name in ROLLOUTS[:2]],
    )
    await ledger.close()
    return settings


def rows(settings: Settings, query: str) -> list[tuple]:
    connection = sqlite3.connect(settings.data / "ledger.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def test_over_a_ledger_at_rest_a_verifier_grades_here_and_nothing_else_goes_on(at_rest: Settings) -> None:
    before = rows(at_rest, "select id, state, score, reward, attempt, outcome from rollouts order by id")
    async with asyncio.timeout(60):
        document = await regrade.regrade(at_rest, RUN[-3:], QUIET)
    assert (document["kind"], document["id"], document["rollouts"], document["left_out"]) == ("run", RUN, 2, 2)
    found = {row["rollout_id"]: (row["old"]["score"], row["new"]["score"], row["trained"]) for row in document["regrades"]}
    assert found == {ROLLOUTS[0]: (0.0, 1.0, True), ROLLOUTS[1]: (0.0, 0.0, True)}
    assert rows(at_rest, "select id, state, score, reward, attempt, outcome from rollouts order by id") == before
    assert rows(at_rest, "select score from scores") == [(0.0,), (0.0,)]
    assert rows(at_rest, "select count(*) from outbox") == [(0,)]
    assert not list((at_rest.data / "sandboxes").glob("*"))
    assert regrade.failed(document) == 0
    async with asyncio.timeout(60):  # and again, as often as one likes
        await regrade.regrade(at_rest, ROLLOUTS[0], QUIET)
    assert rows(at_rest, "select count(*) from regrades where score is not null") == [(3,)]


async def test_what_cannot_be_graded_is_told(at_rest: Settings) -> None:
    Blobs(at_rest.blobs)
    for blob in (Path(at_rest.blobs) / "grader").rglob("*"):
        if blob.is_file():
            blob.unlink()
    async with asyncio.timeout(60):
        document = await regrade.regrade(at_rest, GROUP, QUIET)
    assert {row["new"]["cause"] for row in document["regrades"]} == {"blob_missing"}
    assert regrade.failed(document) == 2


async def test_unknown_ids_and_a_folder_without_a_ledger_are_bad_input(at_rest: Settings, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'nobody'"):
        await regrade.regrade(at_rest, "nobody", QUIET)
    with pytest.raises(InputError, match="holds no ledger"):
        await regrade.regrade(Settings(data=tmp_path / "nowhere"), "latest", QUIET)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.start()
    yield world
    await world.close()


async def test_a_stack_that_runs_uses_its_own_verifiers(world: World, tmp_path: Path) -> None:
    await world.submit(run_file(train={"steps": 1, "groups_per_step": 1, "max_staleness": 0}))
    async with everyone(world):
        await world.until_over()
    elsewhere = Settings(url=world.settings.api, api_token=SecretStr(TOKEN), data=tmp_path / "here")
    world.scores = {session: 1.0 - score for session, score in world.scores.items()}
    async with Workers(lambda: verifier(world)), asyncio.timeout(60):
        document = await regrade.regrade(elsewhere, "latest", QUIET)
    (row,) = document["regrades"]
    assert (document["kind"], row["new"]["score"]) == ("rollout", 1.0 - row["old"]["score"])
    assert not (tmp_path / "here").exists()


def test_the_screen_shows_old_and_new_side_by_side(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 200)

    def said(score: float | None, cause: str | None = None) -> dict:
        return {"score": score, "scores": {}, "cause": cause, "detail": ""}

    def row(rollout: str, old: dict | None, new: dict) -> dict:
        return {"rollout_id": rollout, "task_id": "t", "harness": "pi", "trained": True, "old": old, "new": new}

    document = {
        "left_out": 1,
        "regrades": [
            row("a", said(1.0), said(1.0)),
            row("b", said(0.5), said(1.0)),
            row("c", said(1.0), said(0.0)),
            row("d", said(1.0), said(None, "reward_missing")),
            row("e", said(None, "verifier_failed"), said(0.0)),
        ],
    }
    regrade.show(document)
    head, *table, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["rollout_id", "task_id", "harness", "trained", "old", "new", "change"]
    assert [line.split()[0] for line in table] == ["b", "c", "d", "e", "a"]
    assert table[0].split()[4:] == ["0.5", "1", "higher"]
    assert table[2].split()[4:] == ["1", "reward_missing", "no", "score"]
    assert last.startswith("5 graded again: same 1, higher 2, lower 1, no score 1; left out 1 ")
    assert regrade.failed(document) == 1
