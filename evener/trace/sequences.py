"""Every sampled token of the agent's work is trained in exactly one sequence; no other token is, and each says why.

A sequence is a branch. Branches that share a beginning share its tokens: the first branch, in order of its leaf's number,
trains them, the later ones carry them as context with mask 0. Context, too, is a turn whose log-probabilities failed their
checks, which the later turns of its branch were still asked with. What is no work of the agent's (`evener.trace.classes`) ends
no sequence. Called by the ledger when a trace is archived.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from evener.api.provenance import Provenance, Sampled, Untrained
from evener.trace.classes import Classes
from evener.trace.graph import Graph
from evener.trace.provenance import row_digest, sample_digest, untrained_tokens, version_tokens
from evener.trace.record import CallRecord, Ids, Logprobs

SpanKind = Literal["prompt", "sampled", "context"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a sequence: given to ``call_id`` as its prompt, sampled by it and trained here, or sampled
    by it and not trained here (context).
    """

    start: int
    end: int
    call_id: str
    kind: SpanKind


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One training row; the four arrays are equally long.

    ``sequence_id`` is the call id of the branch's leaf. ``logprobs`` and ``versions`` are 0 where the mask is 0. ``digest``
    is SHA-256 over the bytes of ids, mask, log-probabilities and versions.
    """

    sequence_id: str
    input_ids: Ids
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Logprobs
    versions: Ids
    spans: list[Span]
    provenance: Provenance
    digest: str


def build_sequences(graph: Graph, classes: Classes) -> list[Sequence]:
    """The training rows of a session, in order of their leaves' numbers; none where nothing may be trained."""
    untrained: dict[str, Untrained | None] = {key: _untrained(call, classes) for key, call in graph.calls.items()}
    ends = _ends(graph, untrained)
    sequences: list[Sequence] = []
    for key, call in graph.calls.items():
        if key in ends:
            branch = graph.branch(call)
            sequences.append(_sequence(branch, untrained, graph))
            for each in branch:
                untrained[each.call_id] = untrained[each.call_id] or "earlier_row"
    return sequences


def _untrained(call: CallRecord, classes: Classes) -> Untrained | None:
    kind = classes[call.call_id]
    if kind != "agent":
        return kind
    return None if _checks(call) else "failed_checks"


def _checks(call: CallRecord) -> bool:
    """Whether each of its tokens can be proven: one log-probability, finite and at most 0, and one version."""
    count = len(call.completion_ids)
    if call.level == "text" or not count or not len(call.logprobs) == len(call.versions) == count:
        return False
    return bool(np.isfinite(call.logprobs).all() and call.logprobs.max() <= 0)


def _ends(graph: Graph, untrained: Mapping[str, Untrained | None]) -> set[str]:
    """The calls that are trained and have none below them that is. What is below a call is longer."""
    above: set[str] = set()
    ends: set[str] = set()
    for call in sorted(graph.calls.values(), key=lambda call: -len(call.prompt_ids)):
        key = call.call_id
        if untrained[key] is None and key not in above:
            ends.add(key)
        parent = graph.parent[key]
        if parent is not None and (untrained[key] is None or key in above):
            above.add(parent)
    return ends


def _sequence(branch: list[CallRecord], untrained: Mapping[str, Untrained | None], graph: Graph) -> Sequence:
    leaf = branch[-1]
    ids = leaf.tokens
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.zeros(len(ids), np.int32)
    spans: list[Span] = []
    sampled: list[Sampled] = []
    at = 0
    for call in branch:
        start = len(call.prompt_ids)
        end = start + len(call.completion_ids)
        why = untrained[call.call_id]
        if start > at:
            spans.append(Span(at, start, call.call_id, "prompt"))
        spans.append(Span(start, end, call.call_id, "sampled" if why is None else "context"))
        sampled.append(_sampled(call, why, graph.prompts[call.call_id]))
        if why is None:
            mask[start:end] = 1
            logprobs[start:end] = call.logprobs
            versions[start:end] = call.versions
        at = end
    digest = row_digest(*(array.tobytes() for array in (ids, mask, logprobs, versions)))
    provenance = _provenance(leaf.session_id, len(ids), sampled, versions[mask != 0])
    return Sequence(leaf.call_id, ids, mask, logprobs, versions, spans, provenance, digest)


def _sampled(call: CallRecord, why: Untrained | None, prompt: bytes) -> Sampled:
    used: Any = call.request.get("used")
    given = cast("dict[str, Any]", used) if isinstance(used, dict) else {}
    start = len(call.prompt_ids)
    return Sampled(
        call_id=call.call_id,
        start=start,
        end=start + len(call.completion_ids),
        untrained=why,
        prompt=prompt.hex(),
        sample=sample_digest(call.completion_ids, call.logprobs, call.versions),
        engine=call.engine,
        version_dispatch=call.version_dispatch,
        version_completion=call.version_completion,
        temperature=given.get("temperature"),
        top_p=given.get("top_p"),
        top_k=given.get("top_k"),
    )


def _provenance(session_id: str, tokens: int, calls: list[Sampled], trained: Ids) -> Provenance:
    sampled = sum(call.end - call.start for call in calls)
    return Provenance(
        session_id=session_id,
        given=tokens - sampled,
        sampled=sampled,
        trained=len(trained),
        untrained=untrained_tokens(calls),
        versions=version_tokens(trained),
        engines=sorted({call.engine for call in calls}),
        calls=calls,
    )
