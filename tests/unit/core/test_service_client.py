"""Both clients try again while their service is away, say what failed when it stays away, and read a refusal at once."""

import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from evener.api import ApiClient, Refused
from evener.errors import EvenerError, InfraError
from evener.proxy_admin import ProxyAdmin, SessionConflict
from tests.ports import free_port


class Service:
    """Answers with each of ``statuses`` in turn, the last one for ever."""

    def __init__(self) -> None:
        self.statuses: list[int] = [200]
        self.seen: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(request)
        status = self.statuses[min(len(self.seen), len(self.statuses)) - 1]
        return web.json_response({"detail": "because", "key": "k"}, status=status)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield made
    await runner.cleanup()


async def ask(client: ApiClient | ProxyAdmin) -> None:
    """A request whose answer does not matter."""
    async with client:
        if isinstance(client, ApiClient):
            await client.request("POST", "/v1/runs", {"a": 1})
        else:
            await client.delete("session")


@pytest.mark.parametrize("make", [ApiClient, ProxyAdmin])
async def test_a_fault_of_the_service_is_tried_again(service: Service, make: type[ApiClient] | type[ProxyAdmin]) -> None:
    service.statuses = [500, 503, 200]
    await ask(make(service.url, "token", patience_s=5))
    assert [request.headers["Authorization"] for request in service.seen] == ["Bearer token"] * 3
    assert len({(request.method, request.path) for request in service.seen}) == 1


@pytest.mark.parametrize(("make", "cause"), [(ApiClient, "api_unavailable"), (ProxyAdmin, "proxy_unavailable")])
async def test_a_service_that_stays_away_is_a_fault_of_ours(
    service: Service, make: type[ApiClient] | type[ProxyAdmin], cause: str
) -> None:
    service.statuses = [502]
    for url, telling in ((service.url, "502: {"), (f"http://127.0.0.1:{free_port()}", "127.0.0.1")):
        started = time.monotonic()
        with pytest.raises(InfraError) as raised:
            await ask(make(url, "token", patience_s=0.3))
        assert raised.value.cause == cause
        assert telling in str(raised.value)
        assert time.monotonic() - started < 5
    assert len(service.seen) > 1


@pytest.mark.parametrize(
    ("make", "status", "expected"),
    [
        (ApiClient, 409, Refused),
        (ApiClient, 404, EvenerError),
        (ApiClient, 401, InfraError),
        (ProxyAdmin, 409, SessionConflict),
        (ProxyAdmin, 404, InfraError),
        (ProxyAdmin, 401, InfraError),
    ],
)
async def test_a_refusal_is_not_tried_again(
    service: Service, make: type[ApiClient] | type[ProxyAdmin], status: int, expected: type[Exception]
) -> None:
    service.statuses = [status]
    with pytest.raises(expected):
        await ask(make(service.url, "token"))
    assert len(service.seen) == 1
