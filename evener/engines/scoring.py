"""What an engine says of tokens that were sampled before: their log-probabilities, given all before them.

vLLM's `/v1/completions` with a prompt of ids and ``prompt_logprobs`` (our CPU engine answers the same). They are at
temperature 1, whatever is asked for. Used by `evener rollouts verify`.
"""

from typing import Any, Self

import aiohttp
import msgspec
import numpy as np

from evener.errors import InfraError
from evener.trace.record import Ids, Logprobs

TIMEOUT_S = 300.0


class _Scored(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Scored] | None]


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Scorer:
    """An engine at ``url``; use it as an async context manager."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, connect=5.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def model(self) -> str:
        """What the engine calls its policy. Raises InfraError."""
        models = _decode(await self._request("GET", "/v1/models"), _Models).data
        if not models:
            raise InfraError("engine_error", f"{self._url}/v1/models lists no model")
        return models[0].id

    async def score(self, model: str, ids: Ids) -> Logprobs:
        """The log-probability of each of ``ids[1:]``, float32 [len(ids) - 1]. Raises InfraError."""
        tokens: list[int] = ids.tolist()
        body = {"model": model, "prompt": tokens, "prompt_logprobs": 0, "max_tokens": 1}
        choices = _decode(await self._request("POST", "/v1/completions", body), _Reply).choices
        scored = choices[0].prompt_logprobs[1:] if choices else []
        if len(scored) != len(tokens) - 1:
            raise InfraError("engine_error", f"{self._url} scored {len(scored)} tokens of {len(tokens)}")
        try:
            values = [each[str(token)].logprob for each, token in zip(scored, tokens[1:], strict=True) if each is not None]
        except KeyError as error:
            raise InfraError("engine_error", f"{self._url} scored other tokens than were asked: {error}") from error
        return np.array(values, np.float32)

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        assert self._http is not None, "used outside its context"
        try:
            async with self._http.request(method, self._url + path, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InfraError("engine_unavailable", f"{method} {self._url}{path}: {error or type(error).__name__}") from error
        if response.status != 200:
            told = content[:300].decode(errors="replace")
            raise InfraError("engine_error", f"{method} {self._url}{path}: {response.status}: {told}")
        return content


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise InfraError("engine_error", f"the engine's answer is malformed: {error}: {body[:200]!r}") from error
