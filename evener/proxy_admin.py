"""The way to the proxy's admin side: every call has a deadline, and is tried again while the proxy does not answer.

Used by the runner (open, read, seal) and the orchestrator (seal, delete). A repeated request changes nothing.
"""

import asyncio
import time
from typing import Any, Self

import aiohttp
import msgspec

from evener.errors import InfraError
from evener.trace.session import SessionSpec, SessionState


class SessionConflict(Exception):
    """The session was opened before, by another or by a request of ours whose answer was lost: its key is gone."""


class _Key(msgspec.Struct):
    key: str


class ProxyAdmin:
    """The admin side at ``url``; use it as an async context manager."""

    def __init__(self, url: str, token: str, *, patience_s: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._patience_s = patience_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"}, timeout=aiohttp.ClientTimeout(total=30)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def open(self, spec: SessionSpec) -> str:
        """Open a session and return its key. Raises SessionConflict, InfraError."""
        return msgspec.json.decode(await self._request("POST", "/v1/sessions", spec), type=_Key).key

    async def read(self, session_id: str) -> SessionState:
        """What is known of a session. Raises InfraError ``session_lost`` where there is none."""
        return _state(await self._request("GET", f"/v1/sessions/{session_id}"))

    async def seal(self, session_id: str) -> SessionState:
        """Close a session for good; ``sealed`` of the answer is set. Raises InfraError ``session_lost``."""
        return _state(await self._request("POST", f"/v1/sessions/{session_id}/seal"))

    async def delete(self, session_id: str) -> None:
        """Forget a session. No error where there is none."""
        await self._request("DELETE", f"/v1/sessions/{session_id}")

    async def _request(self, method: str, path: str, body: object = None) -> bytes:
        assert self._http is not None, "use ProxyAdmin as an async context manager"
        data: Any = None if body is None else msgspec.json.encode(body)
        deadline = time.monotonic() + self._patience_s
        pause = 0.1
        while True:
            try:
                async with self._http.request(method, self._url + path, data=data) as response:
                    content = await response.read()
                    if response.status < 500:
                        return _checked(response.status, content, f"{method} {path}")
                    problem = f"{method} {path}: {response.status}: {content[:200].decode(errors='replace')}"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{method} {self._url}{path}: {error or type(error).__name__}"
            if time.monotonic() + pause > deadline:
                raise InfraError("proxy_unavailable", problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)


def _state(content: bytes) -> SessionState:
    return msgspec.json.decode(content, type=SessionState)


def _checked(status: int, content: bytes, what: str) -> bytes:
    if status < 400:
        return content
    detail = f"{what}: {status}: {content[:300].decode(errors='replace')}"
    if status == 409:
        raise SessionConflict(detail)
    if status == 404:
        raise InfraError("session_lost", detail)
    raise InfraError("proxy_refused", detail)
