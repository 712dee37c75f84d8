"""Each call that leaves the line of its trace has one cause."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from evener.trace import build_graph
from evener.trace.forks import FORK_CAUSES, fork_causes
from tests.unit.trace.test_graph import trees
from tests.unit.trace.test_record import make


def call(number, prompt, *, base=0, system="s", level="tokens"):
    """A call that samples token 100 + number; ``base``: the call whose messages its own begin with."""
    record = make(number, np.array(prompt, np.int32), np.array([100 + number]), level=level)
    return dataclasses.replace(record, request={"system_digests": [system], "tools_digest": None, "messages_base": base})


def refused(number, prompt, reason, *, base=0):
    record = call(number, prompt, base=base)
    return dataclasses.replace(record, request=record.request | {"prompt": {"refused": reason}})


def causes(*calls):
    graph = build_graph(list(calls))
    return {graph.calls[key].number: cause for key, cause in fork_causes(graph).items()}


LINE = [call(1, [1]), call(2, [1, 101, 2], base=1)]


@pytest.mark.parametrize(
    ("third", "cause"),
    [
        (call(3, [1, 101, 2, 102, 3], base=2), None),  # goes on
        (call(3, [1, 101, 2], base=2), "repeated"),
        (call(3, [1, 101, 9], base=1), "branched"),  # the agent dropped its second turn
        (call(3, [1, 101, 2, 9, 3], base=2), "rewritten"),  # call 2's reply came back as token 9
        (call(3, [1, 9, 2, 102, 3], base=2), "rewritten"),  # so did call 1's: nothing is shared
        (call(3, [7], system="title"), "other_prompt"),
        (call(3, [1, 8]), "restarted"),
        (call(3, [1], level="text"), None),
        (refused(3, [1, 9, 2, 9, 3], "thinking_dropped", base=2), "thinking_dropped"),
        (refused(3, [1, 9, 2, 9, 3], "no_stop", base=2), "template"),
        (refused(3, [1, 9, 2, 9, 3], "unmatched"), "restarted"),
        (refused(3, [1, 101, 2], "no_stop"), "repeated"),
    ],
)
def test_the_cause_of_a_third_call(third, cause):
    assert causes(*LINE, third) == ({} if cause is None else {3: cause})


def test_a_line_that_starts_anew_goes_on_without_another_cause():
    title = call(3, [7], system="title")
    assert causes(*LINE, title, call(4, [7, 103, 8], base=3, system="title")) == {3: "other_prompt"}


@given(trees())
@settings(max_examples=200, deadline=None)
def test_every_call_goes_on_from_its_parent_or_has_a_cause(calls):
    graph = build_graph(calls)
    found = fork_causes(graph)
    assert set(found.values()) <= set(FORK_CAUSES)
    for children in ([root.call_id for root in graph.roots], *graph.children.values()):
        assert [key for key in children if key not in found] == children[:1]
