"""The engine's client against a server that writes byte for byte what a test says."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from evener.engines.http import PEER_IDLE_S, HttpClient, HttpError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers each request with the next of ``answers``; None: never. Counts its connections."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    await reader.read()  # until the client leaves
                    break
                writer.write(answer)
                if b"connection: close" in answer or b"content-length: 99" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.left.set()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    scripted = Server()
    listening = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield scripted
    listening.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.url + "/base", connect_s=5.0)
    yield client
    client.close()


async def test_a_connection_is_used_again(server, client):
    chunked = b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n3\r\nne!\r\n0\r\n\r\n"
    server.answers = [OK, chunked, OK]
    assert await client.request("POST", "/path", b"body") == (200, b"ok")
    assert await client.request("GET", "/path") == (404, b"none!")
    assert await client.request("GET", "/path") == (200, b"ok")
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /base/path HTTP/1.1\r\nhost: 127.0.0.1:")
    assert server.requests[0].endswith(b"\r\ncontent-length: 4\r\n\r\nbody")


async def test_calls_at_once_have_a_connection_each(server, client):
    server.answers = [OK] * 50
    answers = await asyncio.gather(*(client.request("GET", "/") for _ in range(50)))
    assert set(answers) == {(200, b"ok")}
    assert server.connections == 50


async def test_a_closed_connection_is_not_used_again(server, client):
    server.answers = [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", OK]
    assert await client.request("GET", "/") == (200, b"ok")
    assert await client.request("GET", "/") == (200, b"ok")
    assert server.connections == 2


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nok", b"nonsense\r\n\r\n"])
async def test_an_answer_that_is_cut_or_no_http_is_an_error(server, client, answer):
    server.answers = [answer]
    with pytest.raises(HttpError):
        await client.request("GET", "/")


async def test_a_cancelled_request_closes_its_connection(server, client):
    server.answers = [None, OK]
    asking = asyncio.create_task(client.request("POST", "/", b"body"))
    while not server.requests:
        await asyncio.sleep(0.01)
    asking.cancel()
    async with asyncio.timeout(5):
        await server.left.wait()
    assert asking.cancelled()
    assert await client.request("GET", "/") == (200, b"ok")


async def test_nobody_listening_is_an_error():
    with pytest.raises(HttpError):
        await HttpClient("http://127.0.0.1:9", connect_s=5.0).request("GET", "/")


async def test_credentials_of_the_url_are_sent_as_a_header(server):
    server.answers = [OK]
    client = HttpClient(server.url.replace("//", "//user:p%40ss@"), connect_s=5.0)
    await client.request("GET", "/")
    assert b"authorization: Basic dXNlcjpwQHNz\r\n" in server.requests[0]
    assert b"user" not in server.requests[0]
    client.close()


async def test_a_host_that_is_gone_is_noticed_by_the_kernel(server: Server) -> None:
    server.answers = [OK]
    client = HttpClient(server.url, connect_s=5)
    assert await client.request("GET", "/") == (200, b"ok")
    ((_, connection),) = client._idle
    kept = connection._transport.get_extra_info("socket")
    assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PEER_IDLE_S
    client.close()
