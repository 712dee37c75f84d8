"""The port through which the proxy samples: what is asked of an engine, what it answers, and how it fails.

`evener.engines.vllm` implements it.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from evener.trace.record import Ids, Level, Logprobs


class EngineUnavailable(Exception):
    """The engine did not answer, or failed, or cut the call: the same request may be sent again. ``busy``: it said 429."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        self.busy = busy
        super().__init__(message)


class EngineRefused(Exception):
    """The engine found the request wrong (4xx): sent again it would be refused again.

    ``told``: the message is the engine's own about the request, and not some text between it and us.
    """

    def __init__(self, status: int, message: str, param: str | None, *, told: bool = True) -> None:
        self.told = told
        self.status = status
        self.message = message
        self.param = param
        super().__init__(f"{status}: {message}")

    @property
    def context_full(self) -> bool:
        """The prompt, or prompt + max_tokens, exceeds the window.

        A ``max_tokens`` that an API does not take, or takes up to a bound of its own, says nothing of the window.
        """
        return self.param == "input_tokens" or "maximum context length" in self.message


class PromptGiven(msgspec.Struct, frozen=True):
    """The prompt as a JSON list of ids, which replaces the messages (`evener.engines.token_in`)."""

    prompt_token_ids: msgspec.Raw


class SampleRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Body of the chat route, as the engine gets it. ``messages``, ``tools``, ``tool_choice`` are the agent's, verbatim.

    ``request_id`` names the call in the engine's log; an engine is never told an agent's own ids.
    """

    model: str
    request_id: str | None = None
    messages: Sequence[msgspec.Raw]
    tools: msgspec.Raw | None = None
    tool_choice: msgspec.Raw | None = None
    parallel_tool_calls: bool | None = None
    response_format: msgspec.Raw | None = None
    stop: list[str] | None = None
    max_tokens: int | None = None
    # No default: omit_defaults must not leave them to the engine, which may take a model's own (generation_config.json).
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: bool
    return_token_ids: bool
    kv_transfer_params: PromptGiven | None = None


def neutral_request(model: str, messages: Sequence[msgspec.Raw], temperature: float) -> SampleRequest:
    """A request that samples from the policy's own distribution, but for its temperature, and returns the tokens."""
    return SampleRequest(
        model=model,
        messages=messages,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=True,
        return_token_ids=True,
    )


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as the engine parsed it; ``arguments`` is the model's own text."""

    id: str
    name: str
    arguments: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reply. ``prompt_ids`` [P], ``completion_ids`` [C] int32 with the stop token, ``logprobs`` [C] float32.

    ``versions`` [C] names the policy version of each token, None where the engine does not say. Level ``text``: the arrays
    are empty, and only ``prompt_tokens`` and ``completion_tokens`` are known; ``flaw`` says what is wrong with the token data
    where the engine gave some.
    """

    level: Level
    flaw: str | None = None
    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    versions: Ids | None
    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    stop_reason: int | str | None
    prompt_tokens: int
    completion_tokens: int


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``window`` in tokens; ``version`` of the weights, 0 for those that the engine was started with."""

    model: str
    window: int | None
    version: int


class Sampler(Protocol):
    """An engine as the proxy sees it."""

    @property
    def name(self) -> str:
        """Where the engine is: its URL."""
        ...

    async def sample(self, request: SampleRequest, session: str = "") -> Sample:
        """Sample one reply for a session. Raises EngineUnavailable, EngineRefused, InfraError."""
        ...

    async def tokenize(self, request: SampleRequest) -> int | None:
        """The length in tokens of the request's prompt; None where the engine does not count (a hosted API).

        Raises EngineUnavailable, EngineRefused.
        """
        ...

    async def status(self) -> EngineStatus:
        """What the engine serves. Raises EngineUnavailable."""
        ...

    async def probe(self, model: str) -> Level:
        """Sample one token to learn what the engine lets us record. Raises EngineUnavailable, EngineRefused, InfraError."""
        ...

    async def post(self, path: str, body: bytes) -> bytes:
        """The answer to a document, for other routes than these. Raises EngineUnavailable, EngineRefused."""
        ...
