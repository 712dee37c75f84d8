"""No call samples more than its session may: tokens are reserved before dispatch, and the context ends where it was set.

The store's intent reserves; here it is decided how much to ask for and what ``max_tokens`` the engine gets. Called by
`evener_proxy.calls`.
"""

from evener.engines.sampler import EngineStatus, Sampler, SampleRequest
from evener.trace.session import BudgetSpent, SessionSpec
from evener_proxy.canonical import CallError, CallRequest

# A token is at least one byte of text, and the JSON around a message is longer than a template's marks around it; the
# preamble that templates put before tools is what this allows for.
_TEMPLATE_TOKENS = 512

_TEXTS: dict[BudgetSpent, str] = {
    "calls": "the budget of model calls of this session is spent",
    "tokens": "the budget of sampled tokens of this session is spent",
    "wall": "the time of this session is over",
}


def spent(budget: BudgetSpent, detail: str = "") -> CallError:
    """What the agent sees when a budget is spent: an error that agents do not try again.

    A full context is OpenAI's ``context_length_exceeded``, so that an agent that can compact its history does. The others
    are 403: 429 and 5xx are tried again by every client library, and a 400 is taken for a full context by some.
    """
    if budget == "context":
        return CallError(400, "context_length_exceeded", detail, param="messages")
    return CallError(403, "budget_spent", f"{_TEXTS[budget]}; no further call is answered")


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
    sampler: Sampler, body: SampleRequest, *, grant: int, window: int | None, engine_window: int | None
) -> int | None:
    """``max_tokens`` for the engine: at most ``grant``, and prompt + completion within ``window``.

    The prompt's length is asked for only where it matters. None: the engine's own end of window is the limit (vLLM refuses a
    ``max_tokens`` beyond it). Raises CallError where the prompt alone fills the window.
    """
    if window is None or grant + _most_tokens(body) <= window:
        return grant
    if grant >= window and window == engine_window:
        return None
    prompt = await sampler.tokenize(body)
    if prompt >= window:
        raise spent("context", f"This model's maximum context length is {window} tokens, the prompt has {prompt} tokens.")
    return min(grant, window - prompt)


def _most_tokens(body: SampleRequest) -> int:
    tools = 0 if body.tools is None else len(memoryview(body.tools))
    return sum(len(memoryview(message)) for message in body.messages) + tools + _TEMPLATE_TOKENS
