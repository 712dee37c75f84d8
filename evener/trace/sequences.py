"""Every sampled token that may be trained is trained in exactly one sequence.

A sequence is a branch. Branches that share a beginning share its tokens: the first branch, in order of its leaf's number,
trains them, the later ones carry them as context with mask 0. Not trained at all are calls of level ``text`` and leaves
that the agent never saw: ``delivered`` is "no", or unknown while a later call asked the same prompt again (superseded).
Called by the ledger when a trace is archived.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from evener.trace.graph import Graph
from evener.trace.record import CallRecord, Ids, Logprobs

SpanKind = Literal["prompt", "sampled", "context"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a sequence: given to ``call_id`` as its prompt, sampled by it and trained here, or sampled
    by it and trained in an earlier sequence (context).
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
    digest: str


def build_sequences(graph: Graph) -> list[Sequence]:
    """The training rows of a session, in order of their leaves' numbers; none where nothing may be trained."""
    dropped = _untrained(graph)
    kept = [call for key, call in graph.calls.items() if key not in dropped]
    trained: set[str] = set()
    sequences: list[Sequence] = []
    for call in kept:
        if all(child in dropped for child in graph.children[call.call_id]):
            branch = graph.branch(call)
            sequences.append(_sequence(branch, trained))
            trained.update(each.call_id for each in branch)
    return sequences


def _untrained(graph: Graph) -> set[str]:
    last_with_prompt: dict[bytes, int] = {}
    for call in graph.calls.values():
        last_with_prompt[_prompt_digest(call)] = call.number
    dropped: set[str] = set()
    for leaf in graph.leaves:
        superseded = leaf.delivered == "unknown" and last_with_prompt[_prompt_digest(leaf)] > leaf.number
        if leaf.level == "text" or leaf.delivered == "no" or superseded or not len(leaf.completion_ids):
            dropped.add(leaf.call_id)
    return dropped


def _prompt_digest(call: CallRecord) -> bytes:
    return hashlib.sha256(call.prompt_ids.tobytes()).digest()


def _sequence(branch: list[CallRecord], trained: set[str]) -> Sequence:
    leaf = branch[-1]
    ids = leaf.tokens
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.zeros(len(ids), np.int32)
    spans: list[Span] = []
    at = 0
    for call in branch:
        start = len(call.prompt_ids)
        end = start + len(call.completion_ids)
        if start > at:
            spans.append(Span(at, start, call.call_id, "prompt"))
        if call.call_id in trained:
            spans.append(Span(start, end, call.call_id, "context"))
        else:
            spans.append(Span(start, end, call.call_id, "sampled"))
            mask[start:end] = 1
            logprobs[start:end] = call.logprobs
            versions[start:end] = call.versions
        at = end
    digest = hashlib.sha256()
    for array in (ids, mask, logprobs, versions):
        digest.update(array.tobytes())
    return Sequence(leaf.call_id, ids, mask, logprobs, versions, spans, digest.hexdigest())
