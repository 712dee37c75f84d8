"""What a session is opened with and what can be read of it; the key itself is in neither.

Written by the proxy, read by runner and orchestrator through the admin side.
"""

from typing import Literal

import msgspec

from evener.api.types import Budget, PromptMode, Sampling, Thinking
from evener.messages import Sealed

BudgetSpent = Literal["calls", "tokens", "context", "wall"]


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /v1/sessions``. ``version``: every token must come from it (None: from any, but not from one older than
    ``oldest_version``).
    """

    session_id: str
    rollout_id: str
    attempt: int
    harness: str
    policy: str
    purpose: Literal["train", "eval"]
    version: int | None = None
    oldest_version: int | None = None
    sampling: Sampling = Sampling()
    budget: Budget = Budget()
    prompt_mode: PromptMode = "render"
    thinking: Thinking = "keep"


class PromptProblem(msgspec.Struct, frozen=True):
    """Answer to ``GET /v1/prompts``: why the engines cannot be given prompts as ids, None where they can."""

    problem: str | None


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``GET /v1/sessions/{id}``.

    ``calls`` are the committed ones. ``fault`` is a cause of `evener.errors.CAUSES` and ``last_error`` its text: of the last
    call, None once a later call was committed. ``sealed`` is set from the seal on.
    """

    state: Literal["open", "sealed"]
    calls: int
    sampled_tokens: int
    in_flight: int
    prompt_tokens_max: int
    engine_failures: int
    budget_spent: BudgetSpent | None = None
    fault: str | None = None
    last_error: str | None = None
    sealed: Sealed | None = None
