"""Bodies are read and written with msgspec; a body that does not fit its type is a 400 that names the field.

Used by the routers.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request, Response

from evener.errors import InputError
from evener_orchestrator.context import Context

T = TypeVar("T")


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as ``kind``. Raises InputError that names the field."""
    return parse(await request.body(), kind)


def parse(body: bytes, kind: type[T]) -> T:
    """JSON as ``kind``. Raises InputError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise InputError("request_invalid", str(error)) from error


def as_json(value: object) -> Response:
    """A struct or plain document as a JSON answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def as_msgpack(value: object) -> Response:
    """A struct as a MessagePack answer."""
    return Response(msgspec.msgpack.encode(value), media_type="application/msgpack")


async def read_limited(request: Request, limit: int, what: str) -> bytes:
    """The body, at most ``limit`` bytes. Raises InputError beyond."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise InputError("request_invalid", f"{what}: is over {limit >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


def columns(row: object, names: Iterable[str]) -> Mapping[str, Any]:
    """Some attributes of a row by name."""
    return {name: getattr(row, name) for name in names}


async def _context(request: Request) -> Context:  # what is not async is called in a thread, which costs more than most answers
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


Shared = Annotated[Context, Depends(_context)]
"""The process's shared objects, injected into a route."""
