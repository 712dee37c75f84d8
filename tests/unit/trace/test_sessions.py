"""Whatever an agent does with its history, each step has its class and cause; whatever is lost, no token is trained twice."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.trace import Histories, build_graph, call_classes, find_forks
from evener.trace.forks import FORK_CAUSES
from evener.trace.provenance import untrue
from tests.unit.trace.sessions import Message, Session, bash, result, rows_of, system, user

HEAD = [system("You code."), user("Mend the parser of dates, please.")]


class Agent:
    """Does one thing after the other with the history of its session; ``expected`` are the causes by number."""

    def __init__(self) -> None:
        self.session = Session()
        self.history = list(HEAD)
        self.asked: list[Message] | None = None
        self.expected: dict[int, str] = {}

    @property
    def next(self) -> int:
        return len(self.session.calls) + 1

    def go_on(self, cause: str | None = None) -> None:
        """Ask with the history as it is, and run what the reply calls."""
        number = self.next
        if cause is not None:
            self.expected[number] = cause
        self.asked = list(self.history)
        turn = self.session.ask(self.history, bash(f"c{number}", f"ls {number}", reasoning=f"I think of {number} first."))
        self.history += [turn, result(f"c{number}", f"what ls {number} prints")]

    def retry(self) -> None:
        if self.asked is not None:
            self.history = list(self.asked)
            self.go_on("retry")

    def edit(self) -> None:
        """Change a result that a call was asked with."""
        if len(self.history) >= len(HEAD) + 4 and self.history[-3]["role"] == "tool":
            self.history[-3] = self.history[-3] | {"content": f"elided {self.next}"}
            self.go_on("history_edited")

    def drop_thinking(self) -> None:
        if self.history[-1]["role"] == "tool":
            self.history[-2] = self.history[-2] | {"reasoning": None}
            self.go_on("thinking_dropped")

    def go_back(self) -> None:
        if len(self.history) >= len(HEAD) + 2:
            self.history[-2:] = [user(f"No, not so: {self.next}.")]
            self.go_on("history_edited")

    def ask_aside(self) -> None:
        number = self.next
        self.expected[number] = "subagent"
        self.session.ask([system(f"Name this {number}."), user(f"Text {number}")], {"content": f"Name {number}"}, tools=None)


STEPS = ("go_on", "retry", "edit", "drop_thinking", "go_back", "ask_aside")


def played(steps):
    agent = Agent()
    for step in steps:
        getattr(agent, step)()
    return agent


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=8))
@settings(max_examples=60)
def test_each_step_has_its_cause_and_class(steps):
    agent = played([*steps, "go_on"])
    session = agent.session
    assert session.causes == agent.expected
    aside = {number for number, call in enumerate(session.calls, 1) if call.request["tools_digest"] is None}
    classes = session.classes
    for number, call in enumerate(session.calls, 1):
        again = any(np.array_equal(call.prompt_ids, later.prompt_ids) for later in session.calls[number:])
        went_on = bool(session.graph.children[call.call_id])
        assert (classes[number] == "side") == (number in aside)
        assert (classes[number] == "superseded") == (again and not went_on)


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=8), st.sets(st.integers(1, 8)), st.randoms())
@settings(max_examples=60)
def test_whatever_is_lost_each_row_holds_and_each_token_is_trained_once(steps, lost, rng):
    calls = [call for call in played(steps).session.calls if call.number not in lost]
    rng.shuffle(calls)
    graph = build_graph(calls)
    histories = Histories(graph)
    classes = call_classes(graph, histories)
    forks = find_forks(graph, histories, classes)
    assert {fork.cause for fork in forks.values()} <= set(FORK_CAUSES)
    trained: Counter[str] = Counter()
    for row in rows_of(calls):
        assert untrue(row.provenance, row.input_ids, row.loss_mask, row.logprobs, row.versions) is None
        trained.update(call.call_id for call in row.provenance.calls if call.untrained is None)
    assert trained == Counter(key for key, kind in classes.items() if kind == "agent")
