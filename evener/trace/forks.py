"""Why a trace is not one line: each fork and each new root has one cause, and shows the first difference from what it left.

The line is the first root that is the agent's work, and the first child of each call; every later child, and every other root,
left it. Causes are read from token prefixes, from the histories that the requests bring, and from what the proxy recorded of a
prompt that it could not give as ids; what is in none of these is `unknown`. Called when a trace is archived.

A position is that of the first token that differs from the call which is compared with. The texts around it are those of the
first message that differs, as the records hold it; where all messages say the same, letter for letter, they are token ids: the
ledger has no tokenizer.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from evener.trace.classes import Classes
from evener.trace.graph import Graph
from evener.trace.histories import Histories, Message, common, opening, summary_of
from evener.trace.record import CallRecord, Ids

ForkCause = Literal[
    "template", "retokenised", "history_edited", "thinking_dropped", "compaction", "subagent", "retry", "unknown"
]

FORK_CAUSES: dict[ForkCause, str] = {
    "template": "the history says the same, but its prompt was rendered otherwise before the turn that was sampled last",
    "retokenised": "the history says the same, but a turn came back as other tokens than were sampled",
    "history_edited": "the agent changed, dropped or went back behind a message, or changed thinking, its system text or tools",
    "thinking_dropped": "the history says the same, but without the thinking of an earlier turn",
    "compaction": "it starts anew from a text that an earlier call was asked for: a summary",
    "subagent": "another conversation: its task is in an earlier tool call, or its system text or tools are new",
    "retry": "the same prompt was sampled before",
    "unknown": "a new beginning that nothing recorded explains",
}

_REFUSED: dict[str, ForkCause] = {
    "thinking_dropped": "thinking_dropped",
    **dict.fromkeys(
        (
            "unsound",
            "media",
            "end_unclear",
            "template_failed",
            "turn_not_rendered",
            "new_not_rendered",
            "overlap",
            "no_stop",
            "turn_differs",
            "context_full",
            "not_taken",
            "not_echoed",
        ),
        "template",
    ),
}
"""By what the proxy records, in prompt mode ``token_in``, of a history that goes on but could not be given as ids
(`evener_proxy.token_in.refusals`); its other reasons say no more than the graph does."""

BEFORE, AFTER = 40, 120
"""Characters of a text that are shown around its first difference."""
IDS_BEFORE, IDS_AFTER = 4, 12


@dataclass(frozen=True, slots=True)
class Fork:
    """``position``: the first token that differs from those of the call ``against``; ``was`` and ``now``: both texts there.

    ``against`` is None where no earlier call is.
    """

    cause: ForkCause
    against: str | None
    position: int
    was: str
    now: str


def find_forks(graph: Graph, histories: Histories, classes: Classes) -> dict[str, Fork]:
    """The forks and new roots by call id, in order of number. Calls of level ``text`` have no tokens and are none."""
    roots = [call for call in graph.roots if call.level == "tokens"]
    line = next((call for call in roots if classes[call.call_id] != "side"), roots[0] if roots else None)
    earlier: list[CallRecord] = []
    parents: set[str] = set()
    found: dict[str, Fork] = {}
    for key, call in graph.calls.items():
        if call.level == "text":
            continue
        above = graph.parent[key]
        if above in parents or (above is None and call is not line):
            found[key] = _Explained(call, earlier, graph, histories).fork()
        if above is not None:
            parents.add(above)
        earlier.append(call)
    return found


class _Explained:
    """One call that left the line, beside the calls before it."""

    def __init__(self, call: CallRecord, earlier: list[CallRecord], graph: Graph, histories: Histories) -> None:
        self._call = call
        self._earlier = earlier
        self._graph = graph
        self._histories = histories
        self._turns = histories.turns(call)

    def fork(self) -> Fork:
        cause, against = self._cause()
        if against is None:
            return Fork(cause, None, 0, "", _window(_all(self._turns), 0))
        if cause == "retry":
            return self._retried(against)
        position = _shared(against.tokens, self._call.prompt_ids)
        was, now = self._texts(against, position)
        return Fork(cause, against.call_id, position, was, now)

    def _cause(self) -> tuple[ForkCause, CallRecord | None]:
        """The cause, and the call to show the difference from."""
        if not self._earlier:
            return "subagent", None
        prompt = self._graph.prompts[self._call.call_id]
        asked = [each for each in self._earlier if self._graph.prompts[each.call_id] == prompt]
        if asked:
            return "retry", asked[-1]
        before, shared = self._predecessor()
        if before is not None and shared > len(self._histories.turns(before)):
            return self._said_again(before)
        summary = summary_of(self._call, self._graph, self._histories)
        if summary is not None:
            return "compaction", summary
        task = self._task_giver(shared if before is not None else 0)
        if task is not None:
            return "subagent", task
        if before is not None:
            return "history_edited", before
        nearest = max(self._earlier, key=lambda each: (_shared(each.tokens, self._call.prompt_ids), each.number))
        replies = [self._histories.reply(each) for each in self._earlier]
        if any(turn.role == "assistant" and turn in replies for turn in self._turns):
            return "history_edited", nearest
        known = {opening(each) for each in self._earlier}
        return ("unknown" if opening(self._call) in known else "subagent"), nearest

    def _predecessor(self) -> tuple[CallRecord | None, int]:
        """The earlier call that shares most messages, its reply counted, and how many; None for another conversation.

        It is the same conversation where a turn of the policy is shared, or the system text and tools are.
        """
        best: tuple[CallRecord | None, int] = (None, 0)
        for each in self._earlier:
            whole = self._histories.whole(each)
            shared = common(whole, self._turns)
            same = opening(each) == opening(self._call) or any(turn.role == "assistant" for turn in whole[:shared])
            if same and shared and shared >= best[1]:
                best = (each, shared)
        return best

    def _said_again(self, before: CallRecord) -> tuple[ForkCause, CallRecord]:
        """The history goes on from ``before`` and says the same, but its tokens do not go on, or another's did already."""
        call, graph = self._call, self._graph
        if opening(before) != opening(call):
            return "history_edited", before
        if graph.parent[call.call_id] == before.call_id:
            rivals = [each for each in self._earlier if graph.parent[each.call_id] == before.call_id]
            return "history_edited", max(rivals, key=lambda each: _shared(each.tokens, call.prompt_ids))
        said = self._histories.whole(before)
        thought = [(mine.thinking.split(), now.thinking.split()) for mine, now in zip(said, self._turns, strict=False)]
        if any(now and now != mine for mine, now in thought):
            return "history_edited", before
        if any(mine and not now for mine, now in thought):
            return "thinking_dropped", before
        position = _shared(before.tokens, call.prompt_ids)
        sampled = self._sampled_at(before, position)
        if sampled is not None and self._thinking_left_out(sampled, position):
            return "thinking_dropped", before
        return _REFUSED.get(_refusal(call), "template" if sampled is None else "retokenised"), before

    def _sampled_at(self, leaf: CallRecord, position: int) -> CallRecord | None:
        """The call of ``leaf``'s branch that sampled the token at ``position``, None where it is of a prompt."""
        for each in self._graph.branch(leaf):
            start = len(each.prompt_ids)
            if start <= position < start + len(each.completion_ids):
                return each
        return None

    def _thinking_left_out(self, sampled: CallRecord, position: int) -> bool:
        """Whether the prompt goes on with what was sampled after the thinking."""
        if not self._histories.reply(sampled).thinking:
            return False
        rest = sampled.completion_ids[position - len(sampled.prompt_ids) :]
        after = self._call.prompt_ids[position : position + _PROOF]
        return len(after) == _PROOF and any(
            np.array_equal(rest[start : start + _PROOF], after) for start in range(1, len(rest) - _PROOF + 1)
        )

    def _task_giver(self, start: int) -> CallRecord | None:
        """The latest call one of whose tool calls names the task that a conversation begins with, before its first turn."""
        if any(turn.role == "assistant" for turn in self._turns):
            return None
        told = [turn.text for turn in self._turns[start:] if turn.role == "user"]
        for each in reversed(self._earlier):
            if any(task in text for task in self._histories.reply(each).given for text in told):
                return each
        return None

    def _retried(self, first: CallRecord) -> Fork:
        call = self._call
        position = _shared(first.tokens, call.tokens)
        was, now = self._histories.reply(first).raw, self._histories.reply(call).raw
        at = _first_difference(was, now)
        return Fork("retry", first.call_id, position, _window(was, at), _window(now, at))

    def _texts(self, against: CallRecord, position: int) -> tuple[str, str]:
        histories = self._histories
        was = [*histories.systems(against), *histories.whole(against)]
        now = [*histories.systems(self._call), *self._turns]
        for left, right in zip(was, now, strict=False):
            if left.raw != right.raw:
                at = _first_difference(left.raw, right.raw)
                return _window(left.raw, at), _window(right.raw, at)
        if len(now) < len(was):  # it went back
            return _window(was[len(now)].raw, 0), ""
        return _ids(against.tokens, position), _ids(self._call.prompt_ids, position)


_PROOF = 4
"""Tokens that have to be equal for a piece of a turn to be found again."""


def _refusal(call: CallRecord) -> str:
    """Why the proxy could not give the prompt as ids; empty where it did, or was not asked to."""
    kept = call.request.get("prompt")
    return str(kept.get("refused", "")) if isinstance(kept, dict) else ""


def _shared(left: Ids, right: Ids) -> int:
    """How many leading tokens are equal."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length


def _all(turns: list[Message]) -> str:
    return "\n".join(turn.raw for turn in turns)


def _first_difference(left: str, right: str) -> int:
    for place, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return place
    return min(len(left), len(right))


def _window(text: str, at: int) -> str:
    start = max(0, at - BEFORE)
    return ("…" if start else "") + text[start : at + AFTER] + ("…" if at + AFTER < len(text) else "")


def _ids(tokens: Ids, position: int) -> str:
    shown = tokens[max(0, position - IDS_BEFORE) : position + IDS_AFTER]
    return "ids " + " ".join(map(str, shown.tolist()))
