"""Each call of a trace is one of four: the agent's work, asked beside it, or a sample that nobody went on from.

Only the agent's work is trained. Read from the graph, from what was delivered and from the requests; a call with a child was
delivered, whatever its mark says. Called when a trace is archived.
"""

from collections.abc import Mapping
from typing import Literal

from evener.trace.graph import Graph
from evener.trace.histories import Histories, has_tools, opening, summary_of
from evener.trace.record import CallRecord

CallClass = Literal["agent", "side", "superseded", "undelivered"]
Classes = Mapping[str, CallClass]

CALL_CLASSES: dict[CallClass, str] = {
    "agent": "the agent's own work, a sub-agent's too",
    "side": "asked beside the work: a title, a summary, a choice of a model",
    "superseded": "the same prompt was sampled again, and the agent went on from that sample",
    "undelivered": "the agent was seen to leave before its end, and nothing goes on from it",
}

_DELIVERED = {"yes": 0, "unknown": 1, "no": 2}


def call_classes(graph: Graph, histories: Histories) -> dict[str, CallClass]:
    """The class of each call, by call id."""
    left = _left(graph)
    beside = _beside(graph, histories)
    return {key: left.get(key) or ("side" if key in beside else "agent") for key in graph.calls}


def _left(graph: Graph) -> dict[str, CallClass]:
    """The leaves that nobody went on from, though somebody did from their prompt; and those that nobody got."""
    asked: dict[bytes, list[CallRecord]] = {}
    for key, call in graph.calls.items():
        if call.level == "tokens":
            asked.setdefault(graph.prompts[key], []).append(call)
    found: dict[str, CallClass] = {}
    for same in asked.values():
        went_on = any(graph.children[call.call_id] for call in same)
        best = min(same, key=lambda call: (_DELIVERED[call.delivered], not len(call.completion_ids), -call.number))
        for call in same:
            if not graph.children[call.call_id] and (went_on or call is not best):
                found[call.call_id] = "superseded"
    for leaf in graph.leaves:
        if leaf.delivered == "no":
            found[leaf.call_id] = "undelivered"
    return found


def _beside(graph: Graph, histories: Histories) -> set[str]:
    calls = list(graph.calls.values())
    with_tools = {opening(call)[:-1] for call in calls if has_tools(call)}
    if with_tools:
        beside = {call.call_id for call in calls if not has_tools(call) and _is_beside(call, with_tools, histories)}
    else:
        beside = _lone_openings(graph, histories)
    for call in graph.roots:
        summary = summary_of(call, graph, histories) if call.level == "tokens" else None
        if summary is not None and not graph.children[summary.call_id]:
            beside.add(summary.call_id)
    return beside


def _is_beside(call: CallRecord, with_tools: set[tuple[object, ...]], histories: Histories) -> bool:
    """Among agents with tools a call without is the work's where its system text is, and it has a history."""
    return opening(call)[:-1] not in with_tools or all(turn.role != "assistant" for turn in histories.turns(call))


def _lone_openings(graph: Graph, histories: Histories) -> set[str]:
    """Without any tools: what was asked once, alone, under a system text of its own, beside a conversation of several calls.

    A call with a turn of the policy in its history goes on with something: some agents write the time into the system text.
    """
    numbers: dict[tuple[object, ...], list[str]] = {}
    for key, call in graph.calls.items():
        numbers.setdefault(opening(call), []).append(key)
    if max(map(len, numbers.values()), default=0) < 2:
        return set()
    alone = [graph.calls[keys[0]] for keys in numbers.values() if len(keys) == 1]
    return {
        call.call_id
        for call in alone
        if graph.parent[call.call_id] is None and all(turn.role != "assistant" for turn in histories.turns(call))
    }
