"""An attempt's trace enters the ledger whole, checked against what the proxy sealed; a gap is our fault, never a grade.

What is no gap but cannot be proven (a log-probability that is not finite, or above 0) is kept, and not trained.

The archive is read from Redis before the transaction that stores it, and the proxy may forget the session only after the
commit (see `release`). Called by the consumer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from msgspec import to_builtins
from numpy.typing import NDArray

from evener.messages import Sealed
from evener.trace.classes import Classes, call_classes
from evener.trace.forks import Fork, find_forks
from evener.trace.graph import Graph, build_graph
from evener.trace.histories import Histories
from evener.trace.record import CallRecord
from evener.trace.sequences import Sequence as TrainingRow
from evener.trace.sequences import build_sequences

Array = NDArray[Any]


class Trace(Protocol):
    """Reads a session's captures (`evener.trace.store.TraceStore`)."""

    async def load(self, session_id: str) -> Sequence[CallRecord]:
        """The committed calls, in order of number."""
        ...

    async def texts(self, session_id: str, digests: Collection[str]) -> Mapping[str, bytes]:
        """Those of the system texts and tool lists that are there, by digest."""
        ...


@dataclass(slots=True)
class Archive:
    """Rows to insert for one attempt, and the fault that forbids scoring it, if any (cause, detail).

    ``sampled_by``: the policy versions that sampled a token; ``version_min`` and ``version_max``: those of the trained tokens
    where there are any.
    """

    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    sequences: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    texts: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    sampled_tokens: int = 0
    sampled_by: set[int] = field(default_factory=set[int])
    version_min: int | None = None
    version_max: int | None = None
    fault: tuple[str, str] | None = None


class Archiver:
    """Turns a session's captures into an `Archive`."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    async def read(self, session_id: str, *, sealed: Sealed | None, graded: bool) -> Archive:
        """Read a session. Where the attempt is to be ``graded``, what is missing or wrong becomes the archive's fault."""
        calls = await self._trace.load(session_id)
        texts = await self._trace.texts(session_id, _digests(calls))
        fault = _fault(calls, sealed) if graded else None
        graph = build_graph(calls)
        histories = Histories(graph, texts)
        classes = call_classes(graph, histories)
        sequences = [] if fault or not graded else build_sequences(graph, classes)
        rows = [_sequence_row(session_id, number, sequence) for number, sequence in enumerate(sequences)]
        sampled_by = {int(version) for call in calls for version in np.unique(call.versions)}
        trained_by = {version for row in rows for _, _, version in row["version_runs"]} or sampled_by
        return Archive(
            calls=_call_rows(session_id, graph, classes, find_forks(graph, histories, classes)),
            sequences=rows,
            texts=[{"digest": digest, "body": body.decode(errors="replace")} for digest, body in texts.items()],
            sampled_tokens=sum(len(call.completion_ids) for call in calls),
            sampled_by=sampled_by,
            version_min=min(trained_by, default=None),
            version_max=max(trained_by, default=None),
            fault=fault,
        )


def _digests(calls: Sequence[CallRecord]) -> set[str]:
    """Of the texts that calls name."""
    named = {digest for call in calls for digest in call.request.get("system_digests") or ()}
    return named | {digest for call in calls if (digest := call.request.get("tools_digest"))}


def runs_of(values: Array) -> list[list[int]]:
    """Equal neighbours as ``[start, end, value]``, half open."""
    if len(values) == 0:
        return []
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [[start, end, int(values[start])] for start, end in pairwise(cuts)]


def _fault(calls: Sequence[CallRecord], sealed: Sealed | None) -> tuple[str, str] | None:
    if sealed is None:
        return "capture_gap", "the runner reports no seal"
    if len(calls) != sealed.committed:
        return "capture_gap", f"{sealed.committed} calls were sealed, {len(calls)} are archived"
    for call in calls:
        sampled = len(call.completion_ids)
        if call.level == "tokens" and not len(call.logprobs) == len(call.versions) == sampled:
            return "capture_gap", f"call {call.number}: {sampled} tokens, {len(call.logprobs)} log-probabilities"
    return None


def _call_rows(session_id: str, graph: Graph, classes: Classes, forks: Mapping[str, Fork]) -> list[dict[str, Any]]:
    lengths = {key: len(call.prompt_ids) + len(call.completion_ids) for key, call in graph.calls.items()}
    rows: list[dict[str, Any]] = []
    for call in graph.calls.values():
        parent = graph.parent[call.call_id]
        fork = forks.get(call.call_id)
        rows.append(
            {
                "id": call.call_id,
                "attempt_id": session_id,
                "number": call.number,
                "parent_id": parent,
                "call_class": classes[call.call_id],
                "fork": fork.cause if fork else None,
                "fork_from": fork.against if fork else None,
                "fork_position": fork.position if fork else None,
                "fork_was": fork.was if fork else None,
                "fork_now": fork.now if fork else None,
                "prompt_tokens": len(call.prompt_ids),
                "sampled_tokens": len(call.completion_ids),
                "logprob_sum": float(call.logprobs[np.isfinite(call.logprobs)].sum(dtype=np.float64)),
                "tools": len(call.reply.get("tool_calls") or ()),
                "context_ids": call.prompt_ids[lengths[parent] if parent else 0 :],
                "completion_ids": call.completion_ids,
                "logprobs": call.logprobs,
                "version_runs": runs_of(call.versions),
                "version_dispatch": call.version_dispatch,
                "version_completion": call.version_completion,
                "request": call.request,
                "reply": call.reply,
                "dialect": call.dialect,
                "delivered": call.delivered,
                "level": call.level,
                "engine": call.engine,
                "started_at": datetime.fromtimestamp(call.started, UTC),
                "ended_at": datetime.fromtimestamp(call.ended, UTC),
            }
        )
    return rows


def _sequence_row(session_id: str, number: int, sequence: TrainingRow) -> dict[str, Any]:
    mask = np.asarray(sequence.loss_mask, dtype=np.int8)
    masked = [[start, end] for start, end, value in runs_of(mask) if value]
    versions = [
        [start + offset, end + offset, version]
        for offset, stop in masked
        for start, end, version in runs_of(sequence.versions[offset:stop])
    ]
    return {
        "id": sequence.sequence_id,
        "attempt_id": session_id,
        "number": number,
        "tokens": len(sequence.input_ids),
        "token_ids": sequence.input_ids,
        "logprobs": sequence.logprobs,
        "mask_runs": masked,
        "version_runs": versions,
        "spans": [
            {"start": span.start, "end": span.end, "call_id": span.call_id, "kind": span.kind} for span in sequence.spans
        ],
        "trained_tokens": int(mask.sum()),
        "provenance": to_builtins(sequence.provenance),
        "digest": sequence.digest,
    }
