"""complete: whoever dies before or after any commit or publication, each rollout ends in one outcome and is trained once."""

import itertools
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.simulation import Side, Simulation, simulated, small_run


@pytest.fixture
async def simulation(request, tmp_path: Path) -> AsyncIterator[Simulation]:
    """A simulation in which, with the parameter True, everything dies together."""
    made = Simulation(tmp_path, together=getattr(request, "param", False))
    with simulated(made.seams, made.clock):
        yield made
        await made.close()


async def a_life(simulation: Simulation, fatal: int | None, side: Side, *, evaluated: bool = True) -> None:
    """A run from its submission to its end."""
    await simulation.start(small_run(**({} if evaluated else {"eval": None})))
    simulation.seams.arm(fatal, side)
    await simulation.live()


def rows(folder: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(folder / "ledger.db")) as database:
        return database.execute(query).fetchall()


def everything_is_accounted_for(simulation: Simulation, *, evaluated: bool = True) -> None:
    folder = simulation.folder
    assert rows(folder, "SELECT state, step FROM runs") == [("done", 1)]
    assert rows(folder, "SELECT id, outcome, state FROM rollouts WHERE outcome IS NOT 'finished' OR state <> 'scored'") == []
    assert rows(folder, "SELECT purpose, state, count(*) FROM groups GROUP BY 1, 2 ORDER BY 1, 2") == [
        *([("eval", "closed", 2)] if evaluated else []),
        ("train", "trained", 1),
    ]
    number = 4 if evaluated else 2
    assert rows(folder, "SELECT count(*) FROM rollouts") == [(number,)]
    assert rows(folder, "SELECT rollout_id, count(*) FROM scores GROUP BY 1 HAVING count(*) <> 1") == []
    assert rows(folder, "SELECT count(*) FROM scores") == [(number,)]
    # Each attempt ended once; what was graded is the last one of its rollout, and it alone may be trained.
    assert rows(folder, "SELECT count(*) FROM attempts WHERE outcome IS NULL OR ended_at IS NULL OR released_at IS NULL") == [
        (0,)
    ]
    assert rows(folder, "SELECT count(*) FROM attempts WHERE outcome = 'finished'") == [(number,)]
    earlier = "SELECT count(*) FROM attempts JOIN rollouts ON rollouts.id = rollout_id AND attempts.number < attempt"
    assert rows(folder, f"{earlier} WHERE attempts.outcome = 'finished'") == [(0,)]
    assert rows(folder, "SELECT count(*) FROM calls") == rows(folder, "SELECT count(*) FROM sequences") == [(number,)]
    assert rows(folder, "SELECT groups, json_extract(metrics, '$.rollouts') FROM steps") == [(1, 2.0)]
    assert rows(folder, "SELECT count(*) FROM outbox") == [(0,)]
    assert simulation.wire == []
    assert simulation.trace.calls == {}


async def test_without_a_death_there_are_these_seams(simulation: Simulation):
    await a_life(simulation, None, "before")
    everything_is_accounted_for(simulation)
    assert simulation.deaths == 0
    assert not simulation.context.refused
    calls = simulation.seams.calls
    assert {name for name in calls if name != "commit"} == {
        f"publish {kind}"
        for kind in (
            *("RunRollout", "RolloutFinished", "ScoreWorkspace", "RolloutScored"),
            *("TrainGroup", "PolicyPublished", "StepFinished"),
        )
    }
    assert calls.count("commit") > 20
    assert rows(simulation.folder, "SELECT count(*) FROM attempts") == [(4,)]


@pytest.mark.parametrize("simulation", [False, True], indirect=True, ids=["one process dies", "everything dies"])
@pytest.mark.parametrize("side", ["before", "after"])
async def test_whoever_dies_at_a_seam_nothing_is_lost_or_done_twice(simulation: Simulation, side: Side):
    evaluated = not simulation.together and side == "before"  # the shorter run has every kind of seam as well
    for fatal in itertools.count():
        try:
            await a_life(simulation, fatal, side, evaluated=evaluated)
            assert simulation.deaths == int(simulation.seams.reached)
            everything_is_accounted_for(simulation, evaluated=evaluated)
        except AssertionError as error:
            error.add_note(f"died {side} call {fatal} of {simulation.seams.calls[max(0, fatal - 3) : fatal + 1]}")
            raise
        if not simulation.seams.reached:
            assert fatal > (40 if evaluated else 20)
            return
