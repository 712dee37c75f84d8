"""An engine serves one version of the weights at a time, says which, and never serves a half-loaded one for long.

`WeightSink` is the port; `DiskWeightSink` speaks to vLLM with a weight-transfer back end that reads safetensors from a
folder, and to our CPU engine, which answers the same routes. Running calls are kept over an update and the prefix cache is
cleared, for its keys belong to the old weights. vLLM's side of it is `evener.engines.vllm_disk`. Used by the learner.
"""

import asyncio
from pathlib import Path
from typing import Any, Protocol, Self

import aiohttp
import msgspec

from evener.errors import InfraError

ATTEMPTS = 3
"""How often an update is tried before it counts as failed."""
RETRY_PAUSE_S = 0.2


class WeightSink(Protocol):
    """Where new weights go: one engine. Every method ends within its time limit or raises InfraError."""

    @property
    def name(self) -> str:
        """The engine, for logs."""
        ...

    async def version(self) -> int | None:
        """The version that is served; None where it is none of ours (the weights that the engine was started with)."""
        ...

    async def pause(self) -> None:
        """Hold the running calls at their next token, and clear the prefix cache."""
        ...

    async def publish(self, weights: Path, version: int) -> None:
        """Load the policy folder ``weights``, which the engine must be able to read, and name it ``version``."""
        ...

    async def resume(self) -> None:
        """Let the held calls go on."""
        ...


async def replace_weights(sink: WeightSink, weights: Path, version: int) -> None:
    """Pause, publish, resume, and check what is then served. It resumes whatever happens.

    Raises InfraError ``engine_unavailable`` or ``engine_error``; calling it again repairs whatever was left.
    """
    try:
        await sink.pause()
        await sink.publish(weights, version)
    finally:
        await sink.resume()
    served = await sink.version()
    if served != version:
        raise InfraError("engine_error", f"{sink.name} serves version {served} after an update to {version}")


class DiskWeightSink:
    """A vLLM server, or our engine, at ``url``; use it as an async context manager."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, connect=5.0)
        # A connection each: vLLM closes one on which it failed, and what is asked on it just then looks like a dead engine.
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def name(self) -> str:
        """The engine's URL."""
        return self._url

    async def version(self) -> int | None:
        """``GET /weight_info``."""
        text = str((await self._request("GET", "/weight_info")).get("weight_version", ""))
        return int(text) if text.isascii() and text.isdigit() else None

    async def pause(self) -> None:
        """``POST /pause?mode=keep&clear_cache=true``."""
        await self._request("POST", "/pause?mode=keep&clear_cache=true")

    async def publish(self, weights: Path, version: int) -> None:
        """``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``; again where one fails.

        vLLM refuses to start while an update is under way, which is one that somebody began and did not finish: it is then
        gone on with.
        """
        start = True
        for attempt in range(1, ATTEMPTS + 1):
            started = not start
            try:
                if start:
                    await self._request("POST", "/start_weight_update", {})
                    started = True
                await self._request("POST", "/update_weights", {"update_info": {"path": str(weights.absolute())}})
                await self._request("POST", "/finish_weight_update", {"weight_version": str(version)})
            except InfraError as error:
                if attempt == ATTEMPTS or error.cause == "engine_unavailable":
                    raise
                start = started
                await self._initialise()
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return

    async def resume(self) -> None:
        """``POST /resume``."""
        await self._request("POST", "/resume")

    async def _initialise(self) -> None:
        """vLLM's back end is set up once in an engine's life; an engine that needs no set-up does not know the route."""
        try:
            await self._request("POST", "/init_weight_transfer_engine", {"init_info": {}})
        except InfraError as error:
            if error.cause == "engine_unavailable":
                raise

    async def _request(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        assert self._http is not None, "use DiskWeightSink as an async context manager"
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._http.request(method, self._url + path, data=data, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            what = str(error) or type(error).__name__
            raise InfraError("engine_unavailable", f"{method} {self._url}{path}: {what}") from error
        if response.status != 200:
            text = content[:300].decode(errors="replace")
            raise InfraError("engine_error", f"{method} {self._url}{path}: {response.status}: {text}")
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError:
            return {}
