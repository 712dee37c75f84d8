"""A test runner's line to the verifier, and the end of the process; see the package."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
from typing import Any

SHOWN = 20
_ADDRESS = "EVENER_GUARD"
_ALONE = "EVENER_GUARD_ALONE"
_exit, _write, _dumps = os._exit, os.write, json.dumps


class Line:
    """The connection of one test runner to the verifier, and what it will say."""

    def __init__(self, kind: str) -> None:
        folder, name = os.path.split(os.environ[_ADDRESS])
        here = os.open(".", os.O_PATH)
        connection = socket.socket(socket.AF_UNIX)
        try:
            os.chdir(folder)  # a socket's path has at most 107 bytes
            connection.connect(name)
        finally:
            os.fchdir(here)
            os.close(here)
        self._connection = connection
        self._pid, self._started = os.getpid(), started("self")
        self.closed = False
        self._said: dict[str, Any] = {"kind": kind, "nonce": connection.recv(64).decode(), "canaries": [], "whole": True}

    def canaries(self, passed: str, failed: str) -> None:
        """Note the outcomes of the two checks."""
        self._said["canaries"].append([passed, failed])

    def note(self, **said: Any) -> None:
        """Note how the tests went."""
        self._said.update(said)

    def close(self, status: int, end: bool) -> None:
        """Report, and end the process where it is the test runner's own."""
        if os.getpid() != self._pid or self.closed:
            return
        self.closed = True
        self._said["status"] = int(status)
        if os.environ.get(_ALONE) == "1":
            leave_nothing(self._started)
        with contextlib.suppress(OSError):
            self._connection.sendall(_dumps(self._said).encode() + b"\n")
            self._connection.recv(1)
        if end:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            _exit(int(status))


_lines: list[Line] = []


def opened(kind: str) -> Line | None:
    """This process's line to the verifier; None where nobody listens."""
    if _lines and not _lines[-1].closed:
        _lines[-1].note(kind=kind, whole=True)
        return _lines[-1]
    try:
        if _ADDRESS in os.environ:
            _lines.append(Line(kind))
            return _lines[-1]
    except OSError:
        pass
    return None


def numbers() -> list[int]:
    """Two numbers that differ."""
    return random.SystemRandom().sample(range(1 << 30), 2)


def started(pid: int | str) -> tuple[int, int] | None:
    """Start time in clock ticks since boot (field 22 of proc(5)'s stat), and the parent; None where it is dead."""
    try:
        with open("/proc/%s/stat" % pid) as file:  # noqa: PTH123, UP031
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[19]), int(fields[1]))


def leave_nothing(since: tuple[int, int] | None) -> None:
    """Kill all that was started after this process and is none of its ancestors. Only in a process namespace of our own."""
    with open("/proc/1/comm") as file:  # noqa: PTH123
        if file.read().strip() != "bwrap" or since is None:
            return
    spared, pid = set(), os.getpid()
    while pid > 0:
        spared.add(pid)
        found = started(pid)
        pid = found[1] if found else 0
    for _ in range(50):
        late = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in spared]  # noqa: PTH208
        late = [pid for pid in late if (started(pid) or (-1,))[0] >= since[0]]
        if not late:
            return
        for pid in late:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
