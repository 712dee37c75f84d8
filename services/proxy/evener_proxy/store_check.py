"""A Redis that evicts keys, or that forgets them when it restarts, would lose captures: the proxy does not start on it.

A cache in this process (the embedded stack) is not asked: it lives exactly as long as the proxy. Called by `service.serve`.
"""

from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from evener import log
from evener.errors import InputError

_log = log.get("proxy")


async def check_store(redis: Redis) -> None:
    """Raise InputError ``redis_unsafe`` that names what is set wrongly.

    Where the server does not let us ask (managed ones forbid CONFIG, and INFO says nothing of ``save``), the log says so.
    """
    info: dict[str, Any] = {**await redis.info("memory"), **await redis.info("persistence")}
    policy = str(info.get("maxmemory_policy"))
    if policy != "noeviction":
        raise InputError(
            "redis_unsafe", f"EVENER_REDIS_URL: maxmemory-policy is {policy}: it deletes captures when memory is short"
        )
    if int(info.get("aof_enabled", 0)):
        return
    try:
        save = cast("dict[str, str]", await redis.config_get("save")).get("save", "")
    except ResponseError as error:
        _log.warning("redis_unchecked", problem="appendonly is off, and `save` cannot be asked", error=str(error))
        return
    if not save:
        raise InputError("redis_unsafe", "EVENER_REDIS_URL: neither appendonly nor save is on: a restart loses every capture")
