"""No call samples more than its session may: tokens are reserved before dispatch, and the context ends where it was set.

The store's intent reserves; here it is decided how much to ask for and what ``max_tokens`` the engine gets. Called by
`evener_proxy.calls`.
"""

import re
import secrets
import time

from evener.engines.sampler import EngineStatus, Sampler, SampleRequest
from evener.trace.session import BudgetSpent, SessionSpec
from evener_proxy.canonical import CallRequest, Reply

# A token is at least one byte of text, and the JSON around a message is longer than a template's marks around it; the
# preamble that templates put before tools is what this allows for.
_TEMPLATE_TOKENS = 512

# English prose, code and JSON have 3 to 5 bytes a token under today's vocabularies.
_BYTES_A_TOKEN = 4
_IMAGE_TOKENS = 1000
_IMAGE = re.compile(rb"data:[^;,\"]*;base64,[A-Za-z0-9+/=_-]*")

_TEXTS: dict[BudgetSpent, str] = {
    "calls": "the budget of model calls is spent",
    "tokens": "the budget of sampled tokens is spent",
    "wall": "the time is over",
    "context": "the conversation has filled the model's context window",
}


class Spent(Exception):
    """A budget of the session is spent: no call of it is dispatched."""

    def __init__(self, budget: BudgetSpent) -> None:
        self.budget: BudgetSpent = budget
        super().__init__(budget)


def last_reply(budget: BudgetSpent) -> Reply:
    """What the agent gets in place of a sample: a plain answer without a tool call, which ends the work of every agent.

    An error would not: agents ask again on 429 and 5xx, and take a 400 for a context that they can compact.
    """
    return Reply(
        id=secrets.token_hex(12),
        created=int(time.time()),
        content=f"[evener] This session has ended: {_TEXTS[budget]}.",
        reasoning=None,
        tool_calls=[],
        finish_reason="stop",
        stop_reason=None,
        prompt_tokens=0,
        completion_tokens=0,
    )


def window_of(spec: SessionSpec, status: EngineStatus | None) -> int | None:
    """Tokens that prompt + completion of one call may have; None where nothing says."""
    engine_window = status.window if status is not None else None
    bounds = [bound for bound in (spec.budget.context_tokens, engine_window) if bound is not None]
    return min(bounds) if bounds else None


def to_reserve(spec: SessionSpec, request: CallRequest, window: int | None) -> int:
    """Sampled tokens to ask the store for: what the agent asks, at most one window, at most the whole budget."""
    asked = spec.budget.sampled_tokens if request.max_tokens is None else request.max_tokens
    return min(asked, spec.budget.sampled_tokens, asked if window is None else window)


async def output_limit(
    sampler: Sampler,
    body: SampleRequest,
    *,
    grant: int,
    window: int | None,
    engine_window: int | None,
    prompt_tokens: int | None = None,
) -> int | None:
    """``max_tokens`` for the engine: at most ``grant``, and prompt + completion within ``window``.

    The prompt's length is asked for only where it matters. None: the engine's own end of window is the limit (vLLM refuses a
    ``max_tokens`` beyond it). Where the engine does not count, the prompt is estimated from its bytes, and the engine's own
    error for a full window says the rest. ``prompt_tokens``: its length, where it is given as ids, less than the window. Raises
    Spent where the prompt alone fills the window.
    """
    if prompt_tokens is not None:
        return grant if window is None else min(grant, window - prompt_tokens)
    if window is None or grant + _most_tokens(body) <= window:
        return grant
    if grant >= window and window == engine_window:
        return None
    prompt = await sampler.tokenize(body)
    if prompt is None:
        prompt = _estimate(body)
    if prompt >= window:
        raise Spent("context")
    return min(grant, window - prompt)


def _estimate(body: SampleRequest) -> int:
    """Tokens of a prompt that nothing counts: a token for `_BYTES_A_TOKEN` bytes, and `_IMAGE_TOKENS` for an image."""
    texts = [bytes(memoryview(each)) for each in (*body.messages, *([] if body.tools is None else [body.tools]))]
    found = [_IMAGE.subn(b"", text) for text in texts]
    return sum(len(text) // _BYTES_A_TOKEN + images * _IMAGE_TOKENS for text, images in found)


def _most_tokens(body: SampleRequest) -> int:
    tools = 0 if body.tools is None else len(memoryview(body.tools))
    return sum(len(memoryview(message)) for message in body.messages) + tools + _TEMPLATE_TOKENS
