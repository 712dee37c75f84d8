import asyncio

import pytest
from aiohttp import web

from evener.errors import InputError
from evener.sandbox import pump
from evener.sandbox.pump import address_of

pytestmark = pytest.mark.usefixtures("bubblewrap")

CLIENT = """
import json, sys, urllib.request, urllib.error, socket
def get(path, data=None):
    return urllib.request.urlopen("http://127.0.0.1:8701" + path, data=data, timeout=10).read()
"""


@pytest.fixture
async def proxy():
    """A server on the host's loopback; yields its URL."""

    async def echo(request):
        return web.Response(body=b"echo " + await request.read())

    async def slow(request):
        await asyncio.sleep(30)
        return web.Response()

    async def stream(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(3):
            await response.write(b"%d\n" % number)
            await asyncio.sleep(0.05)
        return response

    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/echo", echo), web.get("/slow", slow), web.get("/stream", stream)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def client(box, script, timeout=20.0):
    result = await box.exec(["/usr/bin/python3", "-c", CLIENT + script], timeout=timeout)
    if result.exit_code == 127:
        pytest.skip("no /usr/bin/python3 to act as the agent")
    return result


async def test_the_proxy_is_reached(sandbox, proxy):
    async with sandbox("bubblewrap", proxy_url=proxy) as box:
        assert box.proxy_url == "http://127.0.0.1:8701"
        result = await client(
            box, "print(get('/echo', b'hello')); print(get('/stream')); print(len(get('/echo', b'x' * 9000000)))"
        )
        assert result.stdout.decode().splitlines() == ["b'echo hello'", r"b'0\n1\n2\n'", "9000005"], result.stderr


async def test_the_agent_can_only_sample(sandbox, proxy):
    port = int(proxy.rsplit(":", 1)[1])
    script = f"""
for address in (("127.0.0.1", {port}), ("127.0.0.1", 22), ("1.1.1.1", 53), ("10.0.0.1", 80), ("::1", {port})):
    try:
        socket.create_connection(address, timeout=3)
        print("reached", address)
    except OSError as error:
        print("refused")
print(sorted(name for _, name in socket.if_nameindex()))
"""
    async with sandbox("bubblewrap", proxy_url=proxy) as box:
        result = await client(box, script)
        assert result.stdout.decode().splitlines() == ["refused"] * 5 + ["['lo']"], result.stderr


async def test_without_a_proxy_there_is_nothing(sandbox):
    async with sandbox("bubblewrap") as box:
        result = await client(box, "print(get('/echo', b''))")
        assert b"Connection refused" in result.stderr


async def test_exit_code_passes_and_open_calls_do_not_hold_it(sandbox, proxy):
    async with sandbox("bubblewrap", proxy_url=proxy) as box:
        script = (
            "import os, threading, time; threading.Thread(target=get, args=('/slow',)).start(); time.sleep(.3); os._exit(5)"
        )
        result = await client(box, script)
        assert result.exit_code == 5
        assert result.seconds < 5
        assert (await box.exec(["sh", "-c", "kill -9 $$"], timeout=5)).exit_code == 137


async def test_a_proxy_that_stays_away_looks_like_a_closed_connection(sandbox, monkeypatch):
    monkeypatch.setattr(pump, "CONNECT_S", 0.5)
    async with sandbox("bubblewrap", proxy_url="http://127.0.0.1:9") as box:
        result = await client(box, "print(get('/echo', b''))")
        assert result.exit_code == 1
        assert b"Remote end closed" in result.stderr or b"reset" in result.stderr
        assert box.proxy_lost


@pytest.mark.parametrize("url", ["https://proxy", "unix:/x", "http://proxy/path"])
def test_what_cannot_be_pumped_to_is_refused(url):
    with pytest.raises(InputError, match="EVENER_PROXY_URL"):
        address_of(url)
