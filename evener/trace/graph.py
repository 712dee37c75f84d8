"""The parent of a call is the call whose prompt + completion is the longest exact token prefix of its prompt.

It is computed from tokens alone, when a trace is archived: the order in which calls arrived, or were listed, does not
matter. Equal candidates (the same request sampled twice with the same tokens) are told apart by what the agent saw: a
delivered one first, then the smaller number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.trace.prefix import prefix_digests
from evener.trace.record import CallRecord

_DELIVERED = {"yes": 0, "unknown": 1, "no": 2}


@dataclass(frozen=True, slots=True)
class Graph:
    """A forest of calls; every listing is in order of number. ``prompts``: the digest of each call's whole prompt."""

    calls: dict[str, CallRecord]
    parent: dict[str, str | None]
    children: dict[str, list[str]]
    prompts: dict[str, bytes]

    @property
    def roots(self) -> list[CallRecord]:
        """Calls without a parent."""
        return [call for key, call in self.calls.items() if self.parent[key] is None]

    @property
    def leaves(self) -> list[CallRecord]:
        """Calls without a child."""
        return [call for key, call in self.calls.items() if not self.children[key]]

    def branch(self, leaf: CallRecord) -> list[CallRecord]:
        """The path from the root to ``leaf``, both included."""
        path = [leaf]
        while (above := self.parent[path[-1].call_id]) is not None:
            path.append(self.calls[above])
        return path[::-1]


def build_graph(calls: Sequence[CallRecord]) -> Graph:
    """Find every parent. Calls of level ``text`` have no tokens and stand alone."""
    ordered = sorted(calls, key=lambda call: (call.number, call.call_id))
    extendable = [call for call in ordered if len(call.completion_ids)]
    lengths = {len(call.prompt_ids) + len(call.completion_ids) for call in extendable}
    digests: dict[str, dict[int, bytes]] = {}
    prompts: dict[str, bytes] = {}
    ends: dict[tuple[int, bytes], CallRecord] = {}
    for call in ordered:
        own = len(call.prompt_ids)
        digests[call.call_id] = prefix_digests(call.tokens, {*lengths, own})
        prompts[call.call_id] = digests[call.call_id][own]
    for call in sorted(extendable, key=lambda call: (_DELIVERED[call.delivered], call.number, call.call_id)):
        total = len(call.prompt_ids) + len(call.completion_ids)
        ends.setdefault((total, digests[call.call_id][total]), call)
    parent: dict[str, str | None] = {}
    children: dict[str, list[str]] = {call.call_id: [] for call in ordered}
    for call in ordered:
        above = _parent(call, digests[call.call_id], ends)
        parent[call.call_id] = above
        if above is not None:
            children[above].append(call.call_id)
    return Graph({call.call_id: call for call in ordered}, parent, children, prompts)


def _parent(call: CallRecord, digests: dict[int, bytes], ends: dict[tuple[int, bytes], CallRecord]) -> str | None:
    for length in sorted(digests, reverse=True):
        if length > len(call.prompt_ids):
            continue
        found = ends.get((length, digests[length]))
        if found is not None and np.array_equal(found.tokens, call.prompt_ids[:length]):
            return found.call_id
    return None
