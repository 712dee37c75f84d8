"""A request to another service of ours is tried again, with back-off, while that service does not answer; each is idempotent.

The base of `evener.api.ApiClient` and `evener.proxy_admin.ProxyAdmin`, which say what an answer means.
"""

import asyncio
import time
from typing import ClassVar, Self

import aiohttp

from evener.errors import InfraError

FIRST_PAUSE_S = 0.1


class ServiceClient:
    """A session with the service at ``url``, whose requests carry ``token``; use it as an async context manager.

    A request that finds no answer (no connection, none in time, status 5xx) is tried again for ``patience_s``.
    """

    UNAVAILABLE: ClassVar[str]
    """The cause that is raised when the service did not answer for ``patience_s``."""
    REQUEST_S: ClassVar[float]
    """Longest that one try may take."""
    LONGEST_PAUSE_S: ClassVar[float]

    def __init__(self, url: str, token: str, *, patience_s: float) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._patience_s = patience_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"}, timeout=aiohttp.ClientTimeout(total=self.REQUEST_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def _answer(self, method: str, path: str, data: bytes | None, *, kind: str = "application/json") -> tuple[int, bytes]:
        """Status (below 500) and body of one request. Raises InfraError `UNAVAILABLE`."""
        assert self._http is not None, f"use {type(self).__name__} as an async context manager"
        deadline = time.monotonic() + self._patience_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with self._http.request(method, self._url + path, data=data, headers={"Content-Type": kind}) as response:
                    content = await response.read()
                    if response.status < 500:
                        return response.status, content
                    problem = f"{method} {path}: {response.status}: {content[:200].decode(errors='replace')}"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{method} {self._url}{path}: {error or type(error).__name__}"
            if time.monotonic() + pause > deadline:
                raise InfraError(self.UNAVAILABLE, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.LONGEST_PAUSE_S)
