"""No token, no answer: every path but the probes and the description of the API asks for the bearer token.

Pure ASGI, so that it costs one comparison. Wrapped around the application by `app.create_app`.
"""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = frozenset({"/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"})
"""Probes, and the schema, which holds no data and which a browser cannot ask for with a header."""


class BearerAuth:
    """Answers 401 to a request without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = JSONResponse(
                    {"detail": "no such token (Authorization: Bearer EVENER_API_TOKEN)"},
                    status_code=401,
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
