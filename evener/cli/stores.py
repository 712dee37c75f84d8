"""What `evener doctor` says of the stores that the settings name: each fault that stops a run is a line with its remedy.

A store of this process alone (no URL) has no line but for the blobs. Nothing that is written stays.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from evener.blobs import Blobs
from evener.cli import sql
from evener.cli.check import Check
from evener.errors import InfraError, InputError
from evener.messages import EVENTS, ROLLOUTS, WORKSPACES, train_queue
from evener.settings import Settings

QUEUES = (ROLLOUTS, WORKSPACES, EVENTS)
WAIT_S = 10.0
FULL = 0.9
"""The part of a store's room or connections from which on it is called nearly full."""
LEAST_BYTES = 1 << 30

NEEDED = {
    "agent": "SELECT DISTINCT agent_bundle FROM tasks JOIN run_tasks ON task_digest = digest JOIN runs ON runs.id = run_id",
    "grader": "SELECT DISTINCT grader_bundle FROM tasks JOIN run_tasks ON task_digest = digest JOIN runs ON runs.id = run_id",
    "weights": "SELECT weights FROM policies AS p JOIN runs ON runs.policy = p.policy AND p.state = 'published'"
    " AND p.version = (SELECT max(version) FROM policies WHERE policy = p.policy AND state = 'published')",
}
"""What an unfinished run still has to read, by area; a condition follows."""
UNFINISHED = " WHERE runs.state IN ('running', 'paused')"
POLICIES = "SELECT policy FROM runs WHERE kind = 'train' AND state IN ('running', 'paused')"


def examine_stores(settings: Settings) -> list[Check]:
    """A line for each store."""
    asked: list[tuple[str, Callable[[], Awaitable[list[Check]]]]] = []
    if settings.amqp_url:
        asked.append(("rabbitmq", lambda: _rabbitmq(settings, str(settings.amqp_url))))
    if settings.redis_url:
        asked.append(("redis", lambda: _redis(str(settings.redis_url))))
    if settings.database_url and settings.database_url.startswith("postgresql"):
        asked.append(("postgres", lambda: _postgres(settings)))
    asked.append(("blobs", lambda: asyncio.to_thread(_blobs, settings)))

    async def all_of_them() -> list[list[Check]]:
        return await asyncio.gather(*(_bounded(name, check) for name, check in asked))

    return [line for lines in asyncio.run(all_of_them()) for line in lines]


async def _bounded(name: str, check: Callable[[], Awaitable[list[Check]]]) -> list[Check]:
    try:
        async with asyncio.timeout(WAIT_S):
            return await check()
    except TimeoutError:
        return [Check(name, "missing", f"no answer within {WAIT_S:g} s")]
    except ImportError as error:
        return [Check(name, "missing", f"{error.name} is not installed: pip install 'evener[orchestrator]'")]


async def _rabbitmq(settings: Settings, url: str) -> list[Check]:
    from evener.bus import connect
    from evener.bus.amqp.link import Lost, Refused
    from evener.bus.amqp.probe import leaderless, probe

    problem = await probe(url)
    if problem is not None:
        return [Check("rabbitmq", "missing", problem)]
    try:
        stuck = await leaderless(url, [*QUEUES, *await asyncio.to_thread(_train_queues, settings)])
    except (Lost, Refused) as error:
        return [Check("rabbitmq", "missing", f"{_place(url)}: {error}")]
    if stuck:
        remedy = f"`rabbitmqctl delete_queue {stuck[0]}`; it is made anew, and what it held is issued again"
        return [Check("rabbitmq", "missing", f"queue {stuck[0]} has no leader and serves nobody: {remedy}")]
    bus = connect(url, patience_s=2.0)
    try:
        dead = len(await bus.dead_letters())
    except InfraError as error:
        return [Check("rabbitmq", "missing", str(error))]
    finally:
        await bus.close()
    if dead:
        return [Check("rabbitmq", "note", f"{dead} dead letters: see `evener dead ls`, then `evener dead retry`")]
    return [Check("rabbitmq", "ok", _place(url))]


async def _redis(url: str) -> list[Check]:
    import redis.asyncio
    from redis.exceptions import RedisError

    client = redis.asyncio.from_url(url, socket_timeout=WAIT_S / 2, socket_connect_timeout=WAIT_S / 2)
    try:
        info: dict[str, Any] = {**await client.info("memory"), **await client.info("persistence")}
    except (RedisError, OSError) as error:
        return [Check("redis", "missing", f"{_place(url)}: {error}; is Redis up? see EVENER_REDIS_URL")]
    finally:
        await client.aclose()
    return [Check("redis", *(redis_fault(info) or ("ok", _place(url))))]


def redis_fault(info: dict[str, Any]) -> tuple[str, str] | None:
    """State and detail of the worst that INFO (memory, persistence) tells of a Redis; None where all is well."""
    policy, used, most = str(info.get("maxmemory_policy")), int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if int(info.get("loading", 0)):
        return "missing", "it still loads its data: wait"
    if policy != "noeviction":
        return "missing", f"maxmemory-policy is {policy}: it deletes captures; set noeviction"
    failed = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
              if info.get(name, "ok") != "ok"]  # fmt: skip
    if failed:
        return "missing", f"{failed[0]} is {info[failed[0]]}: it cannot write to its disk; look at its log and the disk's room"
    if most and used >= most:
        return "missing", f"out of memory ({used >> 20} of {most >> 20} MiB): calls are refused; raise maxmemory"
    if most and used >= FULL * most:
        return "note", f"{used >> 20} of {most >> 20} MiB are used: raise maxmemory before calls are refused"
    return None


async def _postgres(settings: Settings) -> list[Check]:
    state = (
        "SELECT pg_is_in_recovery() AS standby, current_setting('default_transaction_read_only') AS read_only,"
        " current_setting('max_connections')::int AS most,"
        " (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used"
    )
    try:
        row = (await asyncio.to_thread(sql.query, settings, state, limit_s=WAIT_S / 2))[0]
    except InputError as error:
        return [Check("postgres", "missing", error.detail)]
    if row["standby"] or row["read_only"] == "on":
        why = "a standby" if row["standby"] else "default_transaction_read_only is on"
        return [Check("postgres", "missing", f"read-only ({why}): nothing can be recorded; name the primary, or turn it off")]
    if row["used"] >= FULL * row["most"]:
        return [Check("postgres", "note", f"{row['used']} of {row['most']} connections are used: raise max_connections")]
    return [Check("postgres", "ok", _place(settings.database))]


def _train_queues(settings: Settings) -> list[str]:
    """The queues of unfinished runs' learners; none where there is no ledger to ask."""
    try:
        rows = sql.query(settings, POLICIES, limit_s=WAIT_S / 4)
    except InputError:
        return []
    return [train_queue(str(row["policy"])) for row in rows]


def _blobs(settings: Settings) -> list[Check]:
    blobs = Blobs(settings.blobs)
    try:
        blobs.probe()
    except InfraError as error:
        return [Check("blobs", "missing", str(error))]
    if "://" not in settings.blobs:
        free = shutil.disk_usage(settings.blobs).free
        if free < LEAST_BYTES:
            return [Check("blobs", "missing", f"{free >> 20} MiB free at {settings.blobs}: free its disk")]
    gone = _gone(settings, blobs)
    if gone:
        return [Check("blobs", "missing", f"{len(gone)} that an unfinished run needs are gone, {gone[0]} first: restore them")]
    return [Check("blobs", "ok", settings.blobs)]


def _gone(settings: Settings, blobs: Blobs) -> list[str]:
    """Digests that unfinished runs need and the store lacks; none where there is no ledger to ask."""
    gone: list[str] = []
    for area, needed in NEEDED.items():
        try:
            rows = sql.query(settings, needed + UNFINISHED, limit_s=WAIT_S / 2)
        except InputError:
            return []
        digests = [str(digest) for row in rows for digest in row.values() if digest]
        gone += [f"{area}/{digest}" for digest in digests if not blobs.has(area, digest)]  # type: ignore[arg-type]
    return gone


def _place(url: str) -> str:
    """Where a URL points, without its password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
