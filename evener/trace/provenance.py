"""A row's provenance holds where the row's arrays bear it out; what they do not bear out is trained nowhere.

The numbers are written from the captured calls when a trace is archived (`evener.trace.sequences`), and compared with the
arrays before a row is trained (`evener_learner.admission`): the digests of what each call was asked and sampled are of the
capture, not of the row.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from evener.api.provenance import Provenance, Sampled
from evener.trace.prefix import prefix_digests
from evener.trace.record import Ids, Logprobs

Mask = npt.NDArray[np.uint8]


def sample_digest(ids: Ids, logprobs: Logprobs, versions: Ids) -> str:
    """SHA-256, in hex, over what one call sampled."""
    return row_digest(ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes(), versions.astype("<i4").tobytes())


def row_digest(*arrays: bytes) -> str:
    """SHA-256, in hex, over a row's ids, mask, log-probabilities and versions, as they travel."""
    return hashlib.sha256(b"".join(arrays)).hexdigest()


def untrained_tokens(calls: Sequence[Sampled]) -> dict[str, int]:
    """How many sampled tokens are not trained, by reason."""
    found: dict[str, int] = {}
    for call in calls:
        if call.untrained is not None:
            found[call.untrained] = found.get(call.untrained, 0) + call.end - call.start
    return found


def version_tokens(versions: Ids) -> dict[str, int]:
    """How many tokens each policy version sampled, by the version in decimal."""
    values, counts = np.unique(versions, return_counts=True)
    return {str(version): count for version, count in zip(values.tolist(), counts.tolist(), strict=True)}


def untrue(provenance: Provenance, ids: Ids, mask: Mask, logprobs: Logprobs, versions: Ids) -> str | None:
    """What a provenance says that the row's arrays, all of one length, do not bear out; None where it holds."""
    calls = provenance.calls
    if any(not 0 < call.start < call.end <= len(ids) for call in calls):
        return "a call has tokens outside the row"
    if any(before.end > after.start for before, after in pairwise(calls)):
        return "two calls have one token"
    if len({call.call_id for call in calls}) != len(calls):
        return "a call is named twice"
    return (
        _counts(provenance, len(ids), int(np.count_nonzero(mask)))
        or _mask(calls, mask)
        or _samples(calls, ids, logprobs, versions)
        or _versions(provenance, versions[mask != 0])
        or _engines(provenance)
    )


def _counts(provenance: Provenance, tokens: int, trained: int) -> str | None:
    sampled = sum(call.end - call.start for call in provenance.calls)
    untrained = untrained_tokens(provenance.calls)
    found = (tokens - sampled, sampled, trained, untrained)
    said = (provenance.given, provenance.sampled, provenance.trained, provenance.untrained)
    if found != said or trained + sum(untrained.values()) != sampled:
        return f"given, sampled, trained and untrained tokens are {found}, it says {said}"
    return None


def _mask(calls: Sequence[Sampled], mask: Mask) -> str | None:
    expected = np.zeros(len(mask), bool)
    for call in calls:
        expected[call.start : call.end] = call.untrained is None
    if not np.array_equal(expected, mask != 0):
        return "the mask trains other tokens than those that it says are trained"
    return None


def _samples(calls: Sequence[Sampled], ids: Ids, logprobs: Logprobs, versions: Ids) -> str | None:
    prompts = prefix_digests(ids, {call.start for call in calls})
    for call in calls:
        here = slice(call.start, call.end)
        if prompts[call.start].hex() != call.prompt:
            return f"call {call.call_id} was asked another prompt"
        if call.untrained is None and sample_digest(ids[here], logprobs[here], versions[here]) != call.sample:
            return f"call {call.call_id} sampled other tokens, log-probabilities or versions"
    return None


def _versions(provenance: Provenance, trained: Ids) -> str | None:
    found = version_tokens(trained)
    if found != provenance.versions:
        return f"versions {found} sampled its trained tokens, it says {provenance.versions}"
    return None


def _engines(provenance: Provenance) -> str | None:
    found = sorted({call.engine for call in provenance.calls})
    if found != provenance.engines:
        return f"engines {found} sampled its calls, it says {provenance.engines}"
    return None
