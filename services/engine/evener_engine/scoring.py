"""vLLM's `/v1/completions`, as far as it scores a given prompt. Invariant: it samples nothing, and refuses all else.

The log-probabilities are those of the policy at temperature 1, as vLLM's `prompt_logprobs` are. The server calls this.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .wire import ApiError


class ScoreRequest(msgspec.Struct):
    """Body of a request for the log-probabilities of a prompt of ids; `max_tokens` is vLLM's least, and not sampled here."""

    prompt: list[int]
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    model: str | None = None

    def check(self, vocabulary: int, context: int) -> None:
        """Raise ApiError for what is not served here."""
        if self.prompt_logprobs != 0 or self.max_tokens != 1:
            raise ApiError(400, "This engine only scores prompts here: prompt_logprobs must be 0 and max_tokens 1.")
        if len(self.prompt) < 2 or not all(0 <= token < vocabulary for token in self.prompt):
            raise ApiError(400, f"prompt must be at least two ids below {vocabulary}.", "prompt")
        if len(self.prompt) > context:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens, the prompt has {len(self.prompt)}.",
                "input_tokens",
            )

    def reply(self, model: str, logprobs: list[float]) -> dict[str, Any]:
        """The answer: vLLM's, without a completion."""
        scored = [{str(token): {"logprob": value}} for token, value in zip(self.prompt[1:], logprobs, strict=True)]
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": [None, *scored]}
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": 0, "total_tokens": len(self.prompt)}
        return {"object": "text_completion", "model": model, "choices": [choice], "usage": usage}
