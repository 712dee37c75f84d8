"""Prompts as ids on vLLM 0.32's wire: the only module that knows by which routes an engine renders, and takes what is rendered.

The chat route takes ids in ``kv_transfer_params`` instead of rendering its messages, and parses tool calls and reasoning as
ever; vLLM does not document it, and ignores the ids where a message has media, so that the reply's own prompt ids are to be
compared. ``/tokenize`` renders messages and tools as the chat route does, needs no flag, and is older than ``/render``. Used by
the proxy in prompt mode ``token_in``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from evener.engines.sampler import EngineUnavailable, PromptGiven, Sampler
from evener.engines.token_ids import token_ids
from evener.trace.record import Ids

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class _Tokens(msgspec.Struct):
    tokens: msgspec.Raw


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice]


def given(ids: Ids) -> PromptGiven:
    """What a `SampleRequest` gets for its prompt to be these ids."""
    return PromptGiven(msgspec.Raw(_encode(ids.tolist())))


class TokenInRoute:
    """An engine that serves ``model``, as far as its template and its ends of turns go."""

    def __init__(self, sampler: Sampler, model: str) -> None:
        self._sampler = sampler
        self._model = model

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: object) -> Ids:
        """The ids of a prompt, with what opens the reply. ``tools``: their JSON, as data or as `msgspec.Raw`, or None.

        Raises EngineUnavailable, and EngineRefused where the template fails.
        """
        document = {"model": self._model, "messages": messages, "add_generation_prompt": True}
        return await self._tokens(document if tools is None else document | {"tools": tools})

    async def token(self, text: str) -> int | None:
        """The id of a text that is one token of the vocabulary."""
        found = await self._tokens({"model": self._model, "prompt": text, "add_special_tokens": False})
        return int(found[0]) if len(found) == 1 else None

    async def stops(self, ids: Iterable[int]) -> frozenset[int]:
        """Those of ``ids`` at which the engine ends a turn: it is made to sample each, and either ends there or goes on.

        No route names them: they are the model's configuration, and the engine's own.
        """
        return frozenset([token for token in sorted(ids) if await self._finish(token) == "stop"])

    async def _finish(self, token: int) -> str | None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "."}],
            "max_tokens": 2,
            "temperature": 1.0,
            "allowed_token_ids": [token],
        }
        choices = _decode(await self._sampler.post("/v1/chat/completions", _encode(body)), _Choices).choices
        return choices[0].finish_reason if choices else None

    async def _tokens(self, document: dict[str, Any]) -> Ids:
        return token_ids(bytes(_decode(await self._sampler.post("/tokenize", _encode(document)), _Tokens).tokens))


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"the engine's answer is malformed: {error}: {body[:200]!r}") from error
