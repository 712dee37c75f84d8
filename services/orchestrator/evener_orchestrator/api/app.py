"""Every error of the API is a JSON document ``{"detail": text}`` whose text says what to do.

400: the request is malformed; 401: no token; 404: no such object; 409: the ledger refused; 503: a store of ours is down. Where
the fault is in the table of causes (`evener.errors.CAUSES`), ``cause`` names it.
"""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from evener import log
from evener.errors import EvenerError, InputError
from evener_orchestrator.api import attempts, events, groups, health, policies, regrades, rollouts, runs, tasks
from evener_orchestrator.api.auth import BearerAuth
from evener_orchestrator.context import Context
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.faults import FAULTS, is_down

STATUS = {"not_found": 404, "blob_missing": 404, "stack_in_use": 409}
"""Statuses of causes, where it is not 400 (the user's fault) or 503 (ours)."""

_log = log.get("orchestrator")


def create_app(context: Context) -> ASGIApp:
    """The API over ``context``."""
    app = FastAPI(title="Evener", description="Plans rollouts, keeps the ledger.", redoc_url=None)
    app.state.context = context
    for module in (runs, groups, rollouts, regrades, attempts, policies, tasks, events, health):
        app.include_router(module.router)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(Conflict, _conflict)
    app.add_exception_handler(EvenerError, _fault)
    app.add_exception_handler(ClientDisconnect, _nobody)
    for fault in (*FAULTS, RedisError):
        app.add_exception_handler(fault, _store_down)
    return BearerAuth(app, context.settings.api_token.get_secret_value())


async def _malformed(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse({"detail": f"{place}: {first['msg']}"}, status_code=400)


async def _conflict(request: Request, error: Exception) -> JSONResponse:
    context = request.app.state.context
    assert isinstance(context, Context)
    context.refused[request.scope["route"].name] += 1
    return JSONResponse({"detail": str(error)}, status_code=409)


async def _fault(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EvenerError)
    status = STATUS.get(error.cause, 400 if isinstance(error, InputError) else 503)
    detail = error.detail if status in (400, 409) else str(error)
    return JSONResponse({"detail": detail, "cause": error.cause}, status_code=status)


async def _store_down(request: Request, error: Exception) -> JSONResponse:
    """Whoever asks is told to ask again; what is no outage is raised, and ends as a 500."""
    if not (isinstance(error, RedisError) or is_down(error)):
        raise error
    said = (str(error).splitlines() or [type(error).__name__])[0]
    _log.warning("store_down", request=f"{request.method} {request.url.path}", error=said)
    return JSONResponse({"detail": f"a store does not answer, ask again: {said}"}, status_code=503)


async def _nobody(_request: Request, _error: Exception) -> Response:
    """A worker that was stopped amid its request: there is nobody to answer, and nothing was changed."""
    return Response(status_code=400)
