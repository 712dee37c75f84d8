"""The proxy starts on a Redis that keeps what it is given, and on no other."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from pydantic import SecretStr
from redis.exceptions import ResponseError

from evener.errors import InputError
from evener.settings import Settings
from evener_proxy.service import serve
from evener_proxy.store_check import check_store
from tests.ports import free_port

CHANGED = ("maxmemory-policy", "appendonly", "save")


@pytest.fixture
async def client(fresh_redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A Redis whose configuration is put back afterwards."""
    async with asyncio.timeout(30), redis.asyncio.from_url(fresh_redis_url) as client:
        before = {name: (await client.config_get(name))[name] for name in CHANGED}
        yield client
        for name, value in before.items():
            await client.config_set(name, value)


@pytest.mark.parametrize(("appendonly", "save"), [("yes", ""), ("no", "3600 1")])
async def test_a_store_that_keeps_captures_is_taken(client: redis.asyncio.Redis, appendonly: str, save: str) -> None:
    await configure(client, appendonly=appendonly, save=save)
    await check_store(client)


async def test_a_store_that_evicts_is_refused(client: redis.asyncio.Redis) -> None:
    await configure(client, policy="allkeys-lru", appendonly="yes")
    with pytest.raises(InputError, match=r"maxmemory-policy is allkeys-lru.*noeviction") as caught:
        await check_store(client)
    assert caught.value.exit_code == 2


async def test_a_store_that_forgets_at_a_restart_is_refused(client: redis.asyncio.Redis) -> None:
    await configure(client, appendonly="no", save="")
    with pytest.raises(InputError, match=r"neither appendonly nor save.*appendonly yes"):
        await check_store(client)


async def test_a_server_that_forbids_the_question_is_taken(client: redis.asyncio.Redis, monkeypatch) -> None:
    await configure(client, appendonly="no", save="")

    async def forbidden(*_: object) -> None:
        raise ResponseError("unknown command 'CONFIG'")

    monkeypatch.setattr(client, "config_get", forbidden)
    await check_store(client)


async def test_the_proxy_starts_on_the_one_and_not_on_the_other(client: redis.asyncio.Redis, fresh_redis_url: str) -> None:
    token = SecretStr("t")
    settings = Settings(redis_url=fresh_redis_url, proxy_port=free_port(), admin_port=free_port(), admin_token=token)
    await configure(client, appendonly="no", save="")
    stop, ready = asyncio.Event(), asyncio.Event()
    with pytest.raises(InputError, match="this Redis may lose what the proxy captured"):
        await asyncio.wait_for(serve(settings, client, stop=stop, ready=ready), 10)
    await configure(client, appendonly="yes", save="")
    proxy = asyncio.create_task(serve(settings, client, stop=stop, ready=ready))
    await asyncio.wait_for(ready.wait(), 10)
    stop.set()
    await asyncio.wait_for(proxy, 10)


async def configure(
    client: redis.asyncio.Redis, *, policy: str = "noeviction", appendonly: str = "yes", save: str = ""
) -> None:
    for name, value in (("maxmemory-policy", policy), ("appendonly", appendonly), ("save", save)):
        await client.config_set(name, value)
