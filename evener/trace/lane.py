"""Scripts that are asked for while others are on their way travel together, in order, on one connection.

A proxy has thousands of calls in flight; a connection for each write would exhaust the client's pool, and one round trip a
write costs three times the CPU of a shared one. With ``appendfsync always`` the lane also shares the disk's syncs. A
caller that is cancelled does not take its script back.

The lane keeps its connection: taking one from the pool, looking whether it is clean, and giving it back for every round trip
costs more than the trip.

Every script gets one more argument, its last: the run id of the server that it is sent to, asked for on each new connection.
It is empty where that server loses nothing when it restarts (``appendonly`` with ``appendfsync always``), or has no run id (a
Redis inside this process, which lives as long as the proxy).
"""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

Arg = str | bytes | int


TRIP = 16
"""Scripts of one trip at most. What a trip answers goes on in one turn of the event loop: with 256 agents at once, and no
bound, all of them march in step, and ``/healthz`` waits 1.8 s for its turn (p99) where it waits 26 ms with this one."""


PATIENCE = Retry(ExponentialBackoff(cap=0.5, base=0.02), 8)
"""A Redis that is restarted is back within 2 s: nobody has to notice. (A pool's own connections do not try again.)"""


class _Waiting(NamedTuple):
    script: str
    keys: Sequence[str]
    args: Sequence[Arg]
    result: "asyncio.Future[Any]"


class Lane:
    """Runs Lua scripts on ``redis``."""

    def __init__(self, redis: Redis) -> None:
        self._pool: Any = redis.connection_pool
        self._connection: Any = None
        self._waiting: list[_Waiting] = []
        self._loaded: set[str] = set()
        self._sending: asyncio.Task[None] | None = None
        self._server: str | None = None  # None: not asked on this connection

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """What ``script`` returns. Raises RedisError."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(script, keys, args, result))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await result

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:TRIP], self._waiting[TRIP:]
                try:
                    answers = await self._execute(batch)
                except (RedisError, OSError) as error:
                    answers = [error if isinstance(error, RedisError) else RedisError(str(error))] * len(batch)
                except asyncio.CancelledError:  # the event loop ends: nobody may wait for ever meanwhile
                    for waiting in batch:
                        _settle(waiting.result, RedisError("the event loop ended"))
                    await self._leave()
                    raise
                for waiting, answer in zip(batch, answers, strict=True):
                    _settle(waiting.result, answer)
        finally:
            # Whoever cleans up after its own cancellation still has something to say.
            self._sending = asyncio.create_task(self._send()) if self._waiting else None

    async def _leave(self) -> None:
        """Close the connection, some of whose answers may not have been read; the next trip opens it again."""
        self._loaded.clear()
        self._server = None  # perhaps it is another one then
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    async def _execute(self, batch: Sequence[_Waiting]) -> list[Any]:
        answers = await self._pipeline(batch)
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:  # Redis was restarted, or its scripts were flushed
            self._loaded.clear()
            again = await self._pipeline([batch[place] for place in unknown])
            for place, answer in zip(unknown, again, strict=True):
                answers[place] = answer
        return answers

    async def _pipeline(self, batch: Sequence[_Waiting]) -> list[Any]:
        """The answers to ``batch``; sent again on a new connection where one fails, since a repeated script changes nothing."""
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        answers = await PATIENCE.call_with_retry(lambda: self._trip(batch), lambda _: self._leave())
        self._loaded.update(waiting.script for waiting in batch)
        return answers

    async def _trip(self, batch: Sequence[_Waiting]) -> list[Any]:
        connection = self._connection
        if self._server is None:
            await connection.connect()
            self._server = await _server_of(connection)
        packed = [
            _pack("EVALSHA", _sha(script), keys, (*args, self._server))
            if script in self._loaded
            else _pack("EVAL", script, keys, (*args, self._server))
            for script, keys, args, _ in batch
        ]
        await connection.send_packed_command(b"".join(packed), check_health=False)
        answers: list[Any] = []
        for _ in batch:
            try:
                answers.append(await connection.read_response())
            except ResponseError as error:
                answers.append(error)
        return answers


async def _server_of(connection: Any) -> str:
    """The run id of the server at the other end; empty where it forgets nothing, or has none."""
    info = {**await _info(connection, "server"), **await _info(connection, "persistence")}
    if info.get("aof_enabled") == "1" and await _ask(connection, "CONFIG", "GET", "appendfsync") in _ALWAYS:
        return ""
    return info.get("run_id", "")


_ALWAYS: tuple[Any, ...] = ([b"appendfsync", b"always"], {b"appendfsync": b"always"})  # as RESP2 and RESP3 say it


async def _info(connection: Any, section: str) -> dict[str, str]:
    answer = await _ask(connection, "INFO", section)
    lines = answer.decode().splitlines() if isinstance(answer, bytes) else ()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def _ask(connection: Any, *command: str) -> Any:
    """The server's answer; None where it does not know, or forbids, the question."""
    await connection.send_command(*command)
    try:
        return await connection.read_response()
    except ResponseError:
        return None


def _pack(command: str, script: str, keys: Sequence[str], args: Sequence[Arg]) -> bytes:
    """The command as Redis reads it (RESP: an array of bulk strings)."""
    parts = [command.encode(), script.encode(), b"%d" % len(keys)]
    parts += [key.encode() for key in keys]
    parts += [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


@lru_cache
def _sha(script: str) -> str:
    """Redis names a script by its SHA-1."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _settle(result: "asyncio.Future[Any]", answer: Any) -> None:
    if result.done():  # the caller was cancelled
        return
    if isinstance(answer, Exception):
        result.set_exception(answer)
    else:
        result.set_result(answer)
