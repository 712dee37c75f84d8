"""Every process says whether it lives, what it lacks, and how much it did: ``/healthz``, ``/readyz``, ``/metrics``.

A dependency is a name and a check that raises while it is away; none is waited for longer than `CHECK_S`. Proxy and
orchestrator answer on their own ports once they serve; a runner, verifier or learner, and each process that still waits for
what it needs, answers through `serving`. Called by ``evener serve`` and by the services' own ``/readyz``.
"""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web

from evener import log
from evener.errors import InputError

Check = Callable[[], Awaitable[object]]

CHECK_S = 3.0
"""Longest wait for one dependency; probes of compose and Kubernetes give up after 5 to 10 s."""

POLL_S = 0.25
"""Pause before the second look at what is away; doubled up to `LONGEST_POLL_S`, for looking costs the others' start time."""

LONGEST_POLL_S = 2.0
SAY_EVERY_S = 10.0
_log = log.get("health")


class Unready(Exception):
    """What was asked answers, but not with 200, or does not answer."""


async def missing(checks: Mapping[str, Check]) -> list[str]:
    """One line for each dependency that does not answer: its name and why."""
    problems = await asyncio.gather(*(_problem(check) for check in checks.values()))
    return [f"{name}: {problem}" for name, problem in zip(checks, problems, strict=True) if problem is not None]


async def _problem(check: Check) -> str | None:
    try:
        async with asyncio.timeout(CHECK_S):
            await check()
    except TimeoutError:
        return f"no answer within {CHECK_S:g} s"
    except Exception as error:  # noqa: BLE001 - every library says in its own way that its server is away; this is where we ask
        return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
    return None


def document(lacking: list[str], **more: object) -> tuple[int, bytes]:
    """Status and body of ``/readyz``."""
    return 503 if lacking else 200, msgspec.json.encode({"ready": not lacking, "missing": lacking, **more})


def answers(http: aiohttp.ClientSession, url: str) -> Check:
    """A check that ``url`` answers 200."""

    async def check() -> None:
        try:
            async with http.get(url) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    raise Unready(f"{url}: {response.status}: {text}")
        except aiohttp.ClientError as error:
            raise Unready(f"{url}: {error or type(error).__name__}") from error

    return check


async def wait_for(checks: Mapping[str, Check], stop: asyncio.Event) -> bool:
    """Wait until every dependency answers, saying which does not; False where ``stop`` was set before."""
    said, when, pause = list[str](), 0.0, POLL_S
    while not stop.is_set():
        lacking = await missing(checks)
        if not lacking:
            return not stop.is_set()
        names = [line.partition(":")[0] for line in lacking]
        if names != said or time.monotonic() - when > SAY_EVERY_S:
            _log.warning("waiting", missing=lacking)
            said, when = names, time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stop.wait()
        pause = min(2 * pause, LONGEST_POLL_S)
    return False


class Counts:
    """What one worker did since its start, and what it has in hand. Counting is adding to a number, nothing more."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._now: dict[str, float] = {}

    def add(self, name: str, **labels: str) -> None:
        """Count one more of ``evener_{name}_total``."""
        pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self._totals[f"{name}_total{{{pairs}}}" if pairs else f"{name}_total"] += 1

    def set(self, name: str, value: float) -> None:
        """What ``evener_{name}`` is now."""
        self._now[name] = value

    def text(self) -> str:
        """Prometheus text format 0.0.4."""
        lines: list[str] = []
        for kind, series in (("gauge", self._now), ("counter", self._totals)):
            named = ""
            for name, value in sorted(series.items()):
                family = name.partition("{")[0]
                if family != named:
                    lines.append(f"# TYPE evener_{family} {kind}")
                    named = family
                lines.append(f"evener_{name} {value:g}" if isinstance(value, float) else f"evener_{name} {value}")
        return "\n".join(lines) + "\n" if lines else ""


@contextlib.asynccontextmanager
async def serving(host: str, port: int, checks: Mapping[str, Check], counts: Counts) -> AsyncGenerator[None]:
    """Answer the three paths at ``port`` meanwhile. Raises InputError ``port_occupied``."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        status, body = document(await missing(checks))
        return web.Response(status=status, body=body, content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=counts.text().encode(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.SockSite(runner, _bind(host, port)).start()
        yield
    finally:
        await runner.cleanup()


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InputError("port_occupied", f"{host}:{port}: {error.strerror}") from error
    return bound
