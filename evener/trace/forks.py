"""Why a trace is not one line: each call that leaves it has one cause, read from what the graph and the requests say.

In order of number, the first root and the first child of each call go on; every later root and child left the line. Called by
the ledger when a trace is archived.
"""

from typing import Literal

from evener.trace.graph import Graph
from evener.trace.record import CallRecord

ForkCause = Literal["repeated", "thinking_dropped", "template", "rewritten", "other_prompt", "restarted", "branched"]

FORK_CAUSES: dict[ForkCause, str] = {
    "repeated": "the same prompt was asked before",
    "thinking_dropped": "the template strips earlier thinking, and the run wants that: its history was rendered anew",
    "template": "the history goes on, but its prompt could not be given as ids: the engine or its template did not allow it",
    "rewritten": "its messages go on from a later call than its tokens do: the history came back as other tokens",
    "other_prompt": "it starts anew with a system text or tool list that no earlier call had",
    "restarted": "it starts anew under a system text and tool list that an earlier call had",
    "branched": "the agent itself went on from an earlier call",
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
"""By what the proxy recorded in prompt mode ``token_in`` (`evener_proxy.token_in.refusals`); its other reasons say no more than
the graph does."""


def fork_causes(graph: Graph) -> dict[str, ForkCause]:
    """The cause of each call that left the line, by call id. Calls of level ``text`` have no tokens and no cause."""
    causes: dict[str, ForkCause] = {}
    numbers = {key: call.number for key, call in graph.calls.items()}
    parents: set[str | None] = set()
    prompts: set[bytes] = set()
    openings: set[tuple[object, ...]] = set()
    for key, call in graph.calls.items():
        if call.level == "text":
            continue
        parent, prompt, opening = graph.parent[key], call.prompt_ids.tobytes(), _opening(call)
        if parent in parents:
            above = numbers[parent] if parent is not None else 0
            causes[key] = _cause(call, above=above, again=prompt in prompts, new=opening not in openings)
        parents.add(parent)
        prompts.add(prompt)
        openings.add(opening)
    return causes


def _cause(call: CallRecord, *, above: int, again: bool, new: bool) -> ForkCause:
    """``above``: the parent's number, 0 for a root; ``again``: its prompt, ``new``: its opening is (not) an earlier call's."""
    if again:
        return "repeated"
    refused = _REFUSED.get(call.request.get("prompt", {}).get("refused", ""))
    if refused is not None:
        return refused
    if call.request.get("messages_base", 0) > above:
        return "rewritten"
    if above:
        return "branched"
    return "other_prompt" if new else "restarted"


def _opening(call: CallRecord) -> tuple[object, ...]:
    return (*call.request.get("system_digests", ()), None, call.request.get("tools_digest"))
