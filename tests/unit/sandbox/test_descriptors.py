"""A descriptor is closed once, by its owner: a second close of its number would close what another thread opened meanwhile."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from evener.sandbox import Folder, SandboxSpec, create
from evener.sandbox.probe import bubblewrap_missing

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def _file(descriptor: int) -> int | None:
    """The file behind a descriptor; None: it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


@contextmanager
def owners(threads: int = 2) -> Iterator[list[int]]:
    """Threads that open descriptors all the time; those that somebody else closed are listed."""
    lost: list[int] = []
    stop = threading.Event()

    def own() -> None:
        while not stop.is_set():
            held = [os.memfd_create("owned") for _ in range(16)]
            files = [_file(descriptor) for descriptor in held]
            time.sleep(0.0002)
            for descriptor, file in zip(held, files, strict=True):
                if file is None or _file(descriptor) != file:
                    lost.append(descriptor)
                else:
                    os.close(descriptor)

    running = [threading.Thread(target=own, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield lost
    finally:
        stop.set()
        for thread in running:
            thread.join(10)


async def use_sandboxes(kind: str, root: Path) -> None:
    """Every way in which a command can end: by itself, unread, never started, out of time, cancelled early and late."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for number in range(2):
        folder = Folder.make(root, f"sandbox-{number}", ttl_s=60)
        sandbox = await create(kind, SandboxSpec(folder, proxy_url=url))
        result = await sandbox.exec(["sh", "-c", "cat; echo words >&2"], timeout=60, stdin=b"hello")
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"hello", b"words\n")
        await sandbox.exec(["true"], timeout=60, stdin=b"x" * 500_000)
        await sandbox.exec(["/no/such/program"], timeout=60)
        await sandbox.exec(["sleep", "60"], timeout=0.1)
        for pause in (0.0, 0.005, 0.3):
            cancelled = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout=60))
            await asyncio.sleep(pause)
            cancelled.cancel()
            await asyncio.wait({cancelled})
        await asyncio.gather(*(sandbox.exec(["true"], timeout=60) for _ in range(4)))
        await sandbox.snapshot("/workspace")
        await sandbox.destroy()
    server.close()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["process", "bubblewrap"])
def test_a_sandbox_closes_no_descriptor_of_others(kind: str, loop: str, tmp_path: Path) -> None:
    faults: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        missing = await bubblewrap_missing() if kind == "bubblewrap" else None
        if missing:
            pytest.skip(f"bubblewrap does not work here: {missing}")
        await use_sandboxes(kind, tmp_path)

    with owners() as lost, asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
    assert lost == []
    assert faults == []


def test_the_owners_notice_a_second_close() -> None:
    with owners() as lost:
        deadline = time.monotonic() + 20
        while not lost and time.monotonic() < deadline:
            descriptor = os.memfd_create("closed twice")
            os.close(descriptor)
            try:
                os.close(descriptor)
            except OSError:
                continue  # nobody was given the number in between
    assert lost
