"""The admin side: opens, reads, seals and deletes sessions for whoever holds the token; no sandbox reaches its port.

A key leaves here once, in the answer to its session's opening. Called by runner and orchestrator (`evener.proxy_admin`).
"""

import hmac
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.routing import Route

from evener import health
from evener.engines.sampler import EngineUnavailable
from evener.trace.session import PromptProblem, SessionSpec
from evener.trace.store import SessionExists
from evener_proxy.engines import Engines
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Sessions

Handler = Callable[[Request], Awaitable[Response]]


def create_admin(sessions: Sessions, engines: Engines, metrics: Metrics, redis: Redis, token: str) -> FastAPI:
    """The admin side's application; with an empty ``token`` nobody may enter."""
    app = FastAPI(title="evener proxy admin", openapi_url=None, docs_url=None, redoc_url=None)
    store = sessions.store

    async def open_session(request: Request) -> Response:
        try:
            spec = msgspec.json.decode(await request.body(), type=SessionSpec)
        except msgspec.DecodeError as error:
            return _error(422, str(error))
        try:
            key = await sessions.open(spec)
        except SessionExists:
            return _error(409, f"session {spec.session_id} exists")
        return _json(201, {"key": key})

    async def read_session(request: Request) -> Response:
        session_id = str(request.path_params["session_id"])
        state = await store.read(session_id)
        return _json(200, state) if state is not None else _missing(session_id)

    async def seal_session(request: Request) -> Response:
        session_id = str(request.path_params["session_id"])
        if await sessions.seal(session_id) is None:
            return _missing(session_id)
        return await read_session(request)

    async def delete_session(request: Request) -> Response:
        await store.delete(str(request.path_params["session_id"]))
        return Response(status_code=204)

    async def prompt_problem(_: Request) -> Response:
        try:
            return _json(200, PromptProblem(await engines.prompt_problem()))
        except EngineUnavailable as error:
            return _error(503, str(error))

    async def healthz(_: Request) -> Response:
        return _json(200, {"status": "ok"})

    async def readyz(request: Request) -> Response:
        oldest = request.query_params.get("oldest_version", "0")
        if not oldest.isdecimal():
            return _error(422, f"oldest_version is {oldest!r}, not a number")
        lacking = [*engines.problems(int(oldest)), *await health.missing({"redis": redis.ping})]
        if sessions.problem is not None:  # it may answer, and take nothing: out of memory, or a full disk
            lacking.append(f"redis: {sessions.problem}")
        levels = {engine.sampler.name: engine.level for engine in engines.all}
        status, body = health.document(lacking, capture_levels=levels)
        return Response(body, status, media_type="application/json")

    async def numbers(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    def guarded(handler: Handler) -> Handler:
        async def check(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not token or not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _error(401, "the admin token is missing or wrong")
            try:
                return await handler(request)
            except RedisError as error:
                return _error(503, f"redis: {error}")

        return check

    session = "/v1/sessions/{session_id}"
    app.router.routes += [
        Route("/v1/sessions", guarded(open_session), methods=["POST"]),
        Route(session, guarded(read_session), methods=["GET"]),
        Route(session + "/seal", guarded(seal_session), methods=["POST"]),
        Route(session, guarded(delete_session), methods=["DELETE"]),
        Route("/v1/prompts", guarded(prompt_problem), methods=["GET"]),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", numbers),
    ]
    return app


def _json(status: int, document: object) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def _error(status: int, detail: str) -> Response:
    return _json(status, {"detail": detail})


def _missing(session_id: str) -> Response:
    return _error(404, f"there is no session {session_id}")
