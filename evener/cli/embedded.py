"""The whole stack in one process: the same services as in compose, on SQLite, an in-process bus and an in-process cache.

The engine is a child process, unless the settings name others; everything else shares one event loop. Whatever ends the stack
(its own end, Ctrl-C, a service's fault) ends every part of it, the engine within its grace period. Only this module and `serve`
import services.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import aiohttp
from pydantic import SecretStr

from evener import log
from evener.blobs import Blobs
from evener.bus import Bus, MemoryBus
from evener.errors import InfraError, InputError
from evener.messages import RolloutScored
from evener.sandbox import ExecResult
from evener.settings import Settings
from evener.tasks import Task

_log = log.get("stack")

ENGINE_START_S = 120.0
GRACE_S = 2.0
CANCELLED_S = 0.3
LISTENERS = ("proxy", "orchestrator")


@dataclass
class Stack:
    """A running embedded stack.

    ``stop`` ends the workers, ``closing`` then the proxy and the orchestrator, which take the workers' last words.
    """

    settings: Settings
    stop: asyncio.Event
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    bus: Bus = field(default_factory=MemoryBus)
    blobs: Blobs = field(init=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blobs = Blobs(self.settings.blobs)

    def learn(self, policy: str) -> None:
        """Start the learner of ``policy``."""
        from evener_learner import service as learner

        service = learner.serve(self.settings, self.bus, self.blobs, policy=policy, stop=self.stop, name="learner")
        self.start("learner", service)

    def start(self, name: str, service: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a service until the stack stops; its fault stops the stack."""
        task = asyncio.create_task(service, name=name)
        task.add_done_callback(lambda _: self.stop.set())
        self.tasks.append(task)
        return task

    async def started(self, task: asyncio.Task[None], ready: asyncio.Event) -> None:
        """Wait until a service is ready. Raises what it raised if it ended instead."""
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        waiting.cancel()
        if task.done():
            await task
        if not ready.is_set():
            raise InfraError("service_stopped", f"{task.get_name()} was not ready after 60 s")

    def raise_fault(self) -> None:
        """Raise what a service died of, if one did."""
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()


@contextlib.asynccontextmanager
async def embedded(settings: Settings, *, policy: Path, name: str, stop: asyncio.Event) -> AsyncGenerator[Stack]:
    """The stack around an engine that serves one policy folder under ``name``; `Stack.learn` adds the learner.

    Where EVENER_ENGINE_URLS names engines, those are used and none is started.
    """
    settings.data.mkdir(parents=True, exist_ok=True)
    with _locked(settings.data):
        _check_ports(settings)
        settings = _with_secrets(settings)
        stack = Stack(settings, stop)
        _remember(settings)
        async with contextlib.AsyncExitStack() as exits:
            exits.callback((settings.data / "stack.json").unlink, missing_ok=True)
            exits.push_async_callback(_drain, stack)
            async with _engine(settings, policy, name):
                await _services(stack)
                yield stack
                await _drain(stack)


async def _services(stack: Stack) -> None:
    from evener_orchestrator import service as orchestrator
    from evener_proxy import service as proxy
    from evener_runner import service as runner
    from evener_verifier import service as verifier

    settings, stop, closing, bus, blobs = stack.settings, stack.stop, stack.closing, stack.bus, stack.blobs
    redis = _fakeredis()
    proxy_ready, orchestrator_ready = asyncio.Event(), asyncio.Event()
    started = stack.start("proxy", proxy.serve(settings, redis, stop=closing, ready=proxy_ready))
    await stack.started(started, proxy_ready)
    started = stack.start(
        "orchestrator", orchestrator.serve(settings, bus, redis, blobs, stop=closing, ready=orchestrator_ready)
    )
    await stack.started(started, orchestrator_ready)
    stack.start("runner", runner.serve(settings, bus, blobs, stop=stop, name="runner"))
    stack.start("verifier", verifier.serve(settings, bus, blobs, stop=stop, name="verifier"))


@contextlib.asynccontextmanager
async def ledger_only(settings: Settings) -> AsyncGenerator[Settings]:
    """The API over the ledger of the data folder, with no worker beside it: for commands that only read."""
    async with _at_rest(settings, "none") as stack:
        yield stack.settings


@contextlib.asynccontextmanager
async def regrading(settings: Settings) -> AsyncGenerator[Stack]:
    """The same with a verifier, for what is to be graded again: nothing else of a run goes on."""
    from evener_verifier import service as verifier

    with _locked(settings.data):
        async with _at_rest(settings, "regrades") as stack:
            own = stack.settings
            stack.start("verifier", verifier.serve(own, stack.bus, stack.blobs, stop=stack.stop, name="verifier"))
            yield stack


@contextlib.asynccontextmanager
async def _at_rest(settings: Settings, work: Literal["regrades", "none"]) -> AsyncGenerator[Stack]:
    from evener_orchestrator import service as orchestrator

    ready = asyncio.Event()
    settings = _with_secrets(settings).model_copy(update={"api_port": free_port()})
    stack = Stack(settings, asyncio.Event())
    service = orchestrator.serve(settings, stack.bus, _fakeredis(), stack.blobs, stop=stack.closing, ready=ready, work=work)
    task = stack.start("orchestrator", service)
    try:
        await stack.started(task, ready)
        yield stack
    finally:
        await _drain(stack)


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fakeredis() -> Any:
    import fakeredis

    return fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer())


def _with_secrets(settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "api_token": SecretStr(settings.api_token.get_secret_value() or secrets.token_urlsafe(24)),
            "admin_token": SecretStr(settings.admin_token.get_secret_value() or secrets.token_urlsafe(24)),
        }
    )


def _remember(settings: Settings) -> None:
    """Tell other commands of this folder, and nobody else, where the stack listens."""
    path = settings.data / "stack.json"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"pid": os.getpid(), "url": settings.api, "api_token": settings.api_token.get_secret_value()}, file)


@contextlib.contextmanager
def _locked(folder: Path) -> Any:
    """Hold the folder's lock: one embedded stack a folder, since SQLite and the bus live in one process."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise InputError("folder_in_use", f"{folder} (pid {file.read().strip() or 'unknown'})") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.asynccontextmanager
async def scoring_engine(settings: Settings, policy: Path) -> AsyncGenerator[str]:
    """The URL of a CPU engine that serves a policy folder for this command alone, whatever else runs here."""
    own = settings.model_copy(update={"engine_port": free_port(), "engine_urls": []})
    async with _engine(own, policy, "policy"):
        yield own.engines[0]


@contextlib.asynccontextmanager
async def _engine(settings: Settings, policy: Path, name: str) -> AsyncGenerator[None]:
    """The CPU engine as a child process, which is gone when this ends; or the user's own engines, once they answer."""
    if settings.engine_urls:
        for url in settings.engine_urls:
            await _answering(url)
        yield
        return
    logs = settings.data / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "engine.log").open("a") as output:
        child = await _spawn_engine(settings, policy, name, output)
        try:
            await _answering(settings.engines[0], child, logs / "engine.log")
            yield
        finally:
            await _end(child)


async def _spawn_engine(settings: Settings, policy: Path, name: str, output: TextIO) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "evener.cli.main", "serve", "engine", "--policy", str(policy), "--name", name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | {"EVENER_ENGINE_PORT": str(settings.engine_port), "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,  # a Ctrl-C is ours to pass on, after the calls in flight were let go
    )


def _check_ports(settings: Settings) -> None:
    """Say that a port is taken before anything was started: the engine takes seconds."""
    import socket

    ports = {
        "API": settings.api_port,
        "PROXY": settings.proxy_port,
        "ADMIN": settings.admin_port,
        "ENGINE": settings.engine_port,
    }
    if settings.engine_urls:
        del ports["ENGINE"]
    for service, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise InputError("port_occupied", f"{port} on 127.0.0.1 (EVENER_{service}_PORT)") from error


async def _answering(url: str, child: asyncio.subprocess.Process | None = None, logfile: Path | None = None) -> None:
    """Wait for an engine; ``child`` and its log where it is ours. Another's (a hosted API) need not know ``/health``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ENGINE_START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        while loop.time() < deadline:
            if child is not None and logfile is not None and child.returncode is not None:
                raise InfraError("engine_unavailable", f"it ended with {child.returncode}: {_last_line(logfile)}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(f"{url}/health") as response:
                    if response.status == 200 or child is None:
                        return
            await asyncio.sleep(0.1)
    where = f"see {logfile}" if logfile is not None else "EVENER_ENGINE_URLS names it"
    raise InfraError("engine_unavailable", f"no answer at {url} after {ENGINE_START_S:.0f} s; {where}")


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else f"see {path}"


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
        try:
            async with asyncio.timeout(GRACE_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


async def _drain(stack: Stack) -> None:
    """Let the workers end on their own, then the services that listened to them; cancel what takes too long."""
    stack.stop.set()
    await _ended([task for task in stack.tasks if task.get_name() not in LISTENERS])
    stack.closing.set()
    await _ended(stack.tasks)
    # What was cancelled gets a moment, not more: a thread amid an import cannot be stopped, and the process ends anyway.
    ended, _ = await asyncio.wait(stack.tasks, timeout=CANCELLED_S) if stack.tasks else (set[asyncio.Task[None]](), None)
    for task in ended:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("service_failed", name=task.get_name(), error=str(error))


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    tasks = [task for task in tasks if not task.cancelling()]
    if not tasks:
        return
    _, left = await asyncio.wait(tasks, timeout=GRACE_S)
    for task in left:
        _log.warning("service_cancelled", name=task.get_name())
        task.cancel()


def harnesses() -> Any:
    """The table of harness entries."""
    from evener_runner.harnesses import HARNESSES

    return HARNESSES


def harness_installed(settings: Settings, name: str) -> bool:
    """Whether a harness is in the cache folder."""
    from evener_runner.install import installed

    return installed(harnesses()[name], settings.cache)


async def check_task(
    task: Task, blobs: Blobs, sandboxes: Path, settings: Settings
) -> tuple[RolloutScored, RolloutScored, ExecResult | None]:
    """The scores of a task's solution and of its untouched workspace, and how the solution ended (`evener_verifier.oracle`)."""
    from evener_verifier import oracle

    root, images = settings.grader_root, settings.grader_images
    return await oracle.check(task, blobs, sandboxes, host=settings.sandbox, root=root, images=images)


async def install_harness(settings: Settings, name: str, say: Callable[[str], None]) -> None:
    """Install one harness into the cache folder; at once where it is there already."""
    from evener_runner.install import ensure

    await ensure(harnesses()[name], settings.cache, say)


def on_signals(stop: asyncio.Event) -> None:
    """Let Ctrl-C and SIGTERM set ``stop``; a second Ctrl-C kills."""
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        if stop.is_set() and number is signal.SIGINT:
            loop.remove_signal_handler(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
