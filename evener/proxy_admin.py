"""The way to the proxy's admin side: every call has a deadline, and is tried again while the proxy does not answer.

Used by the runner (open, read, seal, problem) and the orchestrator (seal, delete). A repeated request changes nothing.
"""

import asyncio

import aiohttp
import msgspec

from evener.errors import InfraError
from evener.service_client import ServiceClient
from evener.trace.session import PromptProblem, SessionSpec, SessionState

READY_S = 5.0
"""Longest wait for the answer whether a proxy is ready; it waits 3 s for its own store."""


class SessionConflict(Exception):
    """The session was opened before, by another or by a request of ours whose answer was lost: its key is gone."""


class _Key(msgspec.Struct):
    key: str


class ProxyAdmin(ServiceClient):
    """The admin side at ``url``; use it as an async context manager."""

    UNAVAILABLE = "proxy_unavailable"
    REQUEST_S = 30.0
    LONGEST_PAUSE_S = 2.0

    def __init__(self, url: str, token: str, *, patience_s: float = 30.0) -> None:
        super().__init__(url, token, patience_s=patience_s)

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
        """Forget a session, which cannot be opened any more then, also where it never was."""
        await self._request("DELETE", f"/v1/sessions/{session_id}")

    async def problem(self, *, oldest_version: int = 0) -> str | None:
        """What keeps the proxy from answering agents (itself, its engines, its store); None while it can. Asked once.

        An engine that serves an older version than ``oldest_version`` does not count.
        """
        assert self._http is not None, "use ProxyAdmin as an async context manager"
        url = f"{self._url}/readyz?oldest_version={oldest_version}"
        try:
            async with asyncio.timeout(READY_S), self._http.get(url) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{self._url}: {error or type(error).__name__}"
        return None if response.status == 200 else content[:300].decode(errors="replace")

    async def prompt_problem(self) -> str | None:
        """Why the engines cannot be given prompts as ids; None where they can. Raises InfraError while no engine answers."""
        return msgspec.json.decode(await self._request("GET", "/v1/prompts"), type=PromptProblem).problem

    async def _request(self, method: str, path: str, body: object = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        status, content = await self._answer(method, path, data)
        return _checked(status, content, f"{method} {path}")


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
