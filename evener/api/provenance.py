"""What a training row says of where its tokens come from; it travels with the row and is stored beside it.

Every token is given (prompt) or sampled by one of the row's calls; what was sampled is trained in this row, or the row says why
not. `evener.trace.provenance` says whether it holds.
"""

from typing import Literal

import msgspec

Untrained = Literal["earlier_row", "failed_checks", "side", "superseded", "undelivered"]

UNTRAINED: dict[Untrained, str] = {
    "earlier_row": "trained in an earlier row, which shares this beginning",
    "failed_checks": "a log-probability is not finite and at most 0",
    "side": "asked beside the agent's work",
    "superseded": "the same prompt was sampled again",
    "undelivered": "the agent did not get it",
}
"""Why sampled tokens are not trained in a row."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``[start, end)`` of a row, sampled by a call; ``untrained`` says why they are context here, None where they are
    trained.

    ``prompt`` is the digest of the call's whole prompt (`prefix_digests`, hex), ``sample`` that of its ids, log-probabilities
    and versions (`sample_digest`). ``sampling`` is what the engine was asked for.
    """

    call_id: str
    start: int
    end: int
    untrained: Untrained | None
    prompt: str
    sample: str
    engine: str
    version_dispatch: int
    version_completion: int
    temperature: float | None
    top_p: float | None
    top_k: int | None


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Of one row. Token counts: ``given`` + ``sampled`` = all, ``trained`` + the sum of ``untrained`` = ``sampled``.

    ``untrained`` by reason (`UNTRAINED`); ``versions`` trained tokens by policy version (a decimal text); ``calls`` in order.
    """

    session_id: str
    given: int
    sampled: int
    trained: int
    untrained: dict[str, int]
    versions: dict[str, int]
    engines: list[str]
    calls: list[Sampled]
