"""Each call of a trace is one of four: the agent's work, asked beside it, or a sample that nobody went on from.

Only the agent's work is trained. Read from the graph, from what was delivered and from the requests; a call with a child, or
whose reply is in a later history, was delivered, whatever its mark says. Called when a trace is archived.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from evener.trace.graph import Graph
from evener.trace.histories import Histories, common, has_tools, opening, summary_of
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
    left = _left(graph, histories)
    beside = _beside(graph, histories)
    return {key: left.get(key) or ("side" if key in beside else "agent") for key in graph.calls}


def _left(graph: Graph, histories: Histories) -> dict[str, CallClass]:
    """The leaves that nobody went on from, though somebody did from their prompt; and those that nobody got."""
    asked: dict[bytes, list[CallRecord]] = {}
    for key, call in graph.calls.items():
        if call.level == "tokens":
            asked.setdefault(graph.prompts[key], []).append(call)
    found: dict[str, CallClass] = {}
    for same in asked.values():
        kept = _went_on(same, graph, histories) or [min(same, key=_rank)]
        found |= {call.call_id: "superseded" for call in same if call not in kept}
    for leaf in graph.leaves:
        if leaf.delivered == "no" and (leaf.call_id in found or not _echoed(leaf, graph, histories)):
            found[leaf.call_id] = "undelivered"
    return found


def _went_on(same: Sequence[CallRecord], graph: Graph, histories: Histories) -> list[CallRecord]:
    """Of calls that were asked the same: those that tokens go on from, and those of other words that a history goes on from."""
    kept = [call for call in same if graph.children[call.call_id]]
    for call in sorted(same, key=_rank) if len(same) > 1 else ():
        said = [histories.reply(other) for other in kept]
        if histories.reply(call) not in said and _echoed(call, graph, histories):
            kept.append(call)
    return kept


def _rank(call: CallRecord) -> tuple[int, bool, int]:
    """A sample that was delivered comes first, then one that says something, then the last."""
    return _DELIVERED[call.delivered], not len(call.completion_ids), -call.number


def _echoed(call: CallRecord, graph: Graph, histories: Histories) -> bool:
    """Whether a later history goes on from the reply: where it is rendered anew its tokens are not the call's."""
    whole = histories.whole(call)
    later = (each for each in graph.calls.values() if each.number > call.number)
    return any(common(whole, histories.turns(each)) == len(whole) for each in later if opening(each) == opening(call))


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
