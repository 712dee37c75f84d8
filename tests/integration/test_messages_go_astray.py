"""Messages come twice, late, in any order, not at all, or again after a long time: each rollout still ends once."""

import asyncio
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evener.errors import Outcome
from evener_orchestrator import loops
from evener_orchestrator.ledger import runs
from evener_orchestrator.ledger.attempts import ATTEMPTS, expire
from tests.integration.simulation import InFlight, Simulation, simulated, small_run

RUN = small_run(
    rollouts={"group_size": 2, "concurrent": 3},
    train={"steps": 2, "groups_per_step": 1, "max_staleness": 1},
    eval={"tasks": "./held-out", "every": 1, "group_size": 1},
)
PLACE = st.integers(0, 50)
FATES = {
    "finished": {},
    "gave up": {"outcome": Outcome.AGENT_ERROR, "cause": "agent_exit"},
    "infra": {"outcome": Outcome.INFRA_ERROR, "cause": "sandbox_failed"},
    "let go of for a pause": {"outcome": Outcome.CANCELLED},
    "stopped": {"outcome": Outcome.INFRA_ERROR, "cause": "service_stopped"},
    "task": {"outcome": Outcome.TASK_ERROR, "cause": "task_setup"},
    "no snapshot": {"snapshot": None},
    "unsealed": {"sealed": None},
}
VERDICTS = {
    "scored": {},
    "no variance": {"scores": {"reward": 0.5}},
    "verifier": {"scores": {}, "cause": "verifier_failed"},
    "task": {"scores": {}, "cause": "reward_missing"},
    "nonsense": {"scores": {"reward": 7.0}},
}


class Astray(RuleBasedStateMachine):
    """The ledger's handlers under every order of words."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.exits = ExitStack()
        self.folder = Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        self.simulation = Simulation(self.folder)
        self.outcomes: dict[str, str] = {}

    def run(self, work):
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        self.run(self.simulation.start(RUN))
        self.exits.enter_context(simulated(self.simulation.seams, self.simulation.clock))
        self.turn()

    @rule()
    def turn(self) -> None:
        """Planner and outbox."""
        self.run(loops.plan(self.simulation.context))
        self.run(loops.drain_outbox(self.simulation.context))

    @rule(place=PLACE, twice=st.booleans(), fate=st.sampled_from(sorted(FATES)), verdict=st.sampled_from(sorted(VERDICTS)))
    @precondition(lambda self: self.simulation.wire)
    def deliver(self, place: int, twice: bool, fate: str, verdict: str) -> None:
        """Any message in flight arrives; it may stay in flight as well."""
        delivery = self._in_flight(place)
        self._decide(fate, verdict)
        self.run(self.simulation.deliver(delivery))
        if twice:
            self.simulation.wire.append(InFlight(self.simulation.wire, delivery.message))

    @rule()
    def all_arrive(self) -> None:
        """What is in flight arrives in order, and all goes well."""
        self._decide("finished", "scored")
        self.run(self.simulation.round())

    @rule(place=PLACE)
    @precondition(lambda self: self.simulation.wire)
    def lose(self, place: int) -> None:
        """A message does not arrive."""
        self.simulation.wire.remove(self._in_flight(place))

    @rule(place=PLACE)
    @precondition(lambda self: self.simulation.said)
    def come_again(self, place: int) -> None:
        """An old message, also one that was lost or settled long ago."""
        said = self.simulation.said
        self.simulation.wire.append(InFlight(self.simulation.wire, said[place % len(said)]))

    @rule(place=PLACE)
    @precondition(lambda self: self.simulation.wire)
    def fall_silent(self, place: int) -> None:
        """Who gets the message takes it and says nothing more."""
        self.simulation.report = lambda lease, event: None
        self.simulation.judge = lambda event: None
        self.run(self.simulation.deliver(self._in_flight(place)))

    @rule(seconds=st.sampled_from([0.5, 3.0, 31.0, 61.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Leases lapse, commands are issued again."""
        self.simulation.clock.pass_by(seconds)
        self.run(self.simulation.context.ledger.write(expire))
        self.run(loops.issue_again(self.simulation.context, age_s=60.0))

    @rule()
    def learn(self) -> None:
        """The learner claims the policy, or trains a step."""
        self.run(self.simulation.claim_policy())
        self.run(self.simulation.train())

    @rule()
    def learner_dies(self) -> None:
        self.simulation.lose_learner()

    @rule()
    def orchestrator_dies(self) -> None:
        self.run(self.simulation.replace(all_of_them=False))

    @rule(again=st.booleans())
    def pause(self, again: bool) -> None:
        """Pause the run, or go on with it."""
        if self._rows("SELECT state FROM runs")[0][0] in ("running", "paused"):
            self._control(runs.resume if again else runs.pause)

    @rule(doubt=st.integers(0, 9))
    def cancel(self, doubt: int) -> None:
        """Seldom, for little happens afterwards: the run is cancelled."""
        if not doubt and self._rows("SELECT state FROM runs")[0][0] in ("running", "paused"):
            self._control(runs.cancel)

    @invariant()
    def what_is_said_stays_said(self) -> None:
        """An outcome is given once, one attempt at a time is under way, and no bound is exceeded."""
        for rollout, outcome in self._rows("SELECT id, outcome FROM rollouts WHERE outcome IS NOT NULL"):
            assert self.outcomes.setdefault(rollout, outcome) == outcome
        open_ones = "SELECT rollout_id FROM attempts WHERE ended_at IS NULL GROUP BY 1 HAVING count(*) > 1"
        assert self._rows(open_ones) == []
        ours = "outcome = 'infra_error' AND cause <> 'service_stopped'"
        failed = self._rows(f"SELECT max(n) FROM (SELECT count(*) AS n FROM attempts WHERE {ours} GROUP BY rollout_id)")
        assert (failed[0][0] or 0) <= ATTEMPTS
        assert self._rows("SELECT rollout_id FROM scores GROUP BY 1 HAVING count(*) > 1") == []
        of_steps = "SELECT run_id, step FROM steps WHERE groups <> (SELECT count(*) FROM groups WHERE groups.step = steps.step)"
        assert self._rows(of_steps) == []
        whole = "state = 'trained' AND (SELECT count(*) FROM rollouts WHERE group_id = groups.id AND state = 'scored') < 2"
        assert self._rows(f"SELECT id FROM groups WHERE {whole}") == []

    def teardown(self) -> None:
        """Once nothing goes wrong any more, the run ends, and everything in it has."""
        try:
            self._decide("finished", "scored")
            self._finish()
        finally:
            self.run(self.simulation.close())
            self.exits.close()
            self.loop.close()

    def _finish(self) -> None:
        if self._rows("SELECT state FROM runs") == [("paused",)]:
            self._control(runs.resume)
        self.run(self.simulation.live())
        self.what_is_said_stays_said()
        assert self._rows("SELECT state FROM runs")[0][0] in ("done", "failed", "cancelled")
        assert self._rows("SELECT id FROM rollouts WHERE outcome IS NULL") == []
        assert self._rows("SELECT id FROM attempts WHERE ended_at IS NULL OR released_at IS NULL") == []
        assert self._rows("SELECT id FROM groups WHERE state IN ('open', 'training')") == []

    def _in_flight(self, place: int) -> InFlight:
        return self.simulation.wire[place % len(self.simulation.wire)]

    def _decide(self, fate: str, verdict: str) -> None:
        self.simulation.report = lambda lease, event: msgspec.structs.replace(event, **FATES[fate])
        self.simulation.judge = lambda event: msgspec.structs.replace(event, **VERDICTS[verdict])

    def _control(self, verb) -> None:
        async def control(tx) -> None:
            await verb(tx, self._rows("SELECT id FROM runs")[0][0])

        self.run(self.simulation.context.ledger.write(control))

    def _rows(self, query: str) -> list[tuple]:
        with closing(sqlite3.connect(self.folder / "ledger.db")) as database:
            return database.execute(query).fetchall()


TestAstray = Astray.TestCase
TestAstray.settings = settings(max_examples=12, stateful_step_count=40)
