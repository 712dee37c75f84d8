"""A verifier in a process of its own that kills itself at a step: ``python dying.py STEP FOLDER URL``.

The command is on standard input; its bus is in memory, and what it reports goes to the API's ``/events``.
"""

import asyncio
import os
import signal
import sys
from functools import wraps
from pathlib import Path

import aiohttp

from evener.api import ApiClient
from evener.blobs import Blobs
from evener.bus.memory import MemoryBus, MemoryDelivery
from evener.messages import decode, encode
from evener.sandbox.bubblewrap import BubblewrapSandbox
from evener.settings import Settings
from evener_verifier import grader, service, verifier


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(owner, name):
    """After the call of ``owner.name`` the process is gone."""
    call = getattr(owner, name)

    @wraps(call)
    async def dying(*arguments, **named):
        await call(*arguments, **named)
        die()

    @wraps(call)
    def dying_at_once(*arguments, **named):
        call(*arguments, **named)
        die()

    setattr(owner, name, dying if asyncio.iscoroutinefunction(call) else dying_at_once)


def dies_within(owner, name):
    """While ``owner.name`` runs the process goes."""
    call = getattr(owner, name)

    @wraps(call)
    async def dying(*arguments, **named):
        asyncio.get_running_loop().call_later(0.3, die)
        return await call(*arguments, **named)

    setattr(owner, name, dying)


class ReportingBus(MemoryBus):
    """A bus whose events go to the test."""

    def __init__(self, url):
        super().__init__()
        self.url = url

    async def publish(self, message, *, priority=0):
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/events", data=encode(message)) as answer:
            assert answer.status == 200


STEPS = {
    "asked": lambda: dies_after(ApiClient, "scoring"),
    "fetched": lambda: dies_after(verifier, "fetch"),
    "sandbox made": lambda: dies_after(BubblewrapSandbox, "make"),
    "workspace unpacked": lambda: dies_after(BubblewrapSandbox, "upload"),
    "tests running": lambda: dies_within(BubblewrapSandbox, "exec"),
    "graded": lambda: dies_after(grader._Grading, "run"),
    "cleaned up": lambda: dies_after(verifier, "score"),
    "reported": lambda: dies_after(ReportingBus, "publish"),
    "acknowledged": lambda: dies_after(MemoryDelivery, "ack"),
}


async def main(folder, url, command):
    bus = ReportingBus(url)
    await MemoryBus.publish(bus, decode(command))
    settings = Settings(data=Path(folder) / "data", url=url, verifier_slots=1)
    await service.serve(settings, bus, Blobs(Path(folder) / "blobs"), stop=asyncio.Event(), name="dying")


if __name__ == "__main__":
    STEPS[sys.argv[1]]()
    service.score = verifier.score
    asyncio.run(main(sys.argv[2], sys.argv[3], sys.stdin.buffer.read()))
