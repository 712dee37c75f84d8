"""What a `Sample` holds is the engine's own: its ids and log-probabilities, checked and never made again from text.

Reads the chat route of vLLM 0.32, with which our CPU engine answers too, and of hosted APIs, which give no tokens. Used by
`evener.engines.vllm`.
"""

import math
from array import array
from collections.abc import Callable

import msgspec
import numpy as np

from evener.engines.sampler import EngineUnavailable, Sample, ToolCall
from evener.engines.token_ids import token_ids
from evener.errors import InfraError
from evener.trace.record import Ids, Logprobs


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | None  # null is how JSON encoders write what is not finite
    token: str = ""


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Versions(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Versions] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


_NULL = msgspec.Raw(b"null")  # a union of Raw and None is not a type that msgspec decodes


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    prompt_token_ids: msgspec.Raw = _NULL


_reply = msgspec.json.Decoder(_Reply)
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_BY_ID = "token_id:"  # what vLLM writes for a token's text under --return-tokens-as-token-ids
_PROMPT_IDS = b'"prompt_token_ids":'
_TAKEN_OUT = msgspec.Raw(b"0")


def parse_reply(body: bytes, read_ids: Callable[[bytes], Ids] = token_ids) -> Sample:
    """Decode and check a reply of the chat route. ``read_ids`` reads the list of the prompt's ids.

    Token data that contradict each other are a ``flaw``: the reply stands, at level ``text``. Raises EngineUnavailable where
    the engine cut the call (finish ``abort``), and InfraError ``engine_error`` where the body is not a reply.
    """
    try:
        reply, prompt_ids = _decode_reply(body, read_ids)
        choice = reply.choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise InfraError("engine_error", f"the reply is malformed: {error}: {body[:200]!r}") from error
    if choice.finish_reason == "abort":
        raise EngineUnavailable("the engine cut the call (finish_reason abort)")
    message = choice.message
    logprobs = choice.logprobs.content if choice.logprobs is not None else None
    try:
        flaw, arrays = None, _token_data(reply, choice, prompt_ids, logprobs)
    except _Flaw as found:
        flaw, arrays = str(found), None
    return Sample(
        level="text" if arrays is None else "tokens",
        flaw=flaw,
        prompt_ids=_NO_IDS if arrays is None else arrays[0],
        completion_ids=_NO_IDS if arrays is None else arrays[1],
        logprobs=_NO_LOGPROBS if arrays is None else arrays[2],
        versions=None if arrays is None else arrays[3],
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=[ToolCall(each.id, each.function.name, each.function.arguments) for each in message.tool_calls or ()],
        finish_reason=choice.finish_reason or "stop",
        stop_reason=choice.stop_reason,
        prompt_tokens=reply.usage.prompt_tokens,
        completion_tokens=reply.usage.completion_tokens,
    )


def _decode_reply(body: bytes, read_ids: Callable[[bytes], Ids]) -> tuple[_Reply, Ids]:
    """A reply, and its prompt's ids. Raises msgspec.DecodeError.

    The ids, most of the body, are taken out of it first, which the decoder would go through one by one. Inside a string the
    quotes of their name would be escaped, so that it is found only as a name; whether it is the reply's own name, and not that
    of something in it, shows in where the place holder comes out.
    """
    start = body.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    begin = body.find(b"[", start, start + 2)
    end = body.find(b"]", begin) + 1
    if start >= len(_PROMPT_IDS) and begin > 0 and end > 0:
        reply = _reply.decode(b"%b%b%b" % (body[:begin], _TAKEN_OUT, body[end:]))
        if reply.prompt_token_ids == _TAKEN_OUT:
            return reply, read_ids(body[begin:end])
    reply = _reply.decode(body)
    return reply, _NO_IDS if reply.prompt_token_ids == _NULL else read_ids(bytes(reply.prompt_token_ids))


class _Flaw(Exception):
    """The token data of a reply contradict each other."""


def _token_data(
    reply: _Reply, choice: _Choice, prompt_ids: Ids, logprobs: list[_Logprob] | None
) -> tuple[Ids, Ids, Logprobs, Ids | None] | None:
    """Prompt ids, completion ids, log-probabilities and versions, or None where the engine gives none (level text)."""
    if not len(prompt_ids) and choice.token_ids is None:
        return None
    if not len(prompt_ids) or choice.token_ids is None or logprobs is None:
        raise _Flaw("prompt ids, token ids and log-probabilities are not all there")
    lengths = (len(choice.token_ids), len(logprobs), reply.usage.completion_tokens)
    if len(set(lengths)) != 1 or len(prompt_ids) != reply.usage.prompt_tokens:
        raise _Flaw(f"token ids, log-probabilities and usage differ in number: {lengths}")
    given = [math.nan if each.logprob is None else each.logprob for each in logprobs]
    values = np.frombuffer(array("f", given), np.float32)
    if len(values) and not (np.isfinite(values).all() and values.max() <= 0):
        raise _Flaw("a log-probability is not finite or greater than 0")
    if logprobs and logprobs[0].token.startswith(_BY_ID):
        named = [each.token.removeprefix(_BY_ID) for each in logprobs]
        if named != [str(token) for token in choice.token_ids]:
            raise _Flaw("the log-probabilities name other tokens than the token ids")
    versions = _versions(choice.weight_versions, len(choice.token_ids))
    return prompt_ids, _ids(choice.token_ids), values, versions


def _ids(values: list[int]) -> Ids:
    try:
        return np.frombuffer(array("i", values), np.int32)
    except OverflowError as error:
        raise _Flaw("a token id is not an int32") from error


def _versions(runs: list[_Versions] | None, length: int) -> Ids | None:
    if not runs:
        return None
    versions = np.full(length, -1, np.int32)
    for run in runs:
        versions[run.start : run.end] = version_of(run.version)
    if (versions < 0).any():
        raise _Flaw(f"weight_versions do not cover the {length} tokens of the reply")
    return versions


def version_of(text: str) -> int:
    """The policy version of a ``weight_version``: vLLM names its first weights ``default``, Evener publishes integers."""
    if text == "default":
        return 0
    if not text.isdecimal():
        raise InfraError("engine_error", f"the engine's weight version {text!r} is not one of ours (an integer)")
    return int(text)
