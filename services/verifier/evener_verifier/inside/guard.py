"""Inside an in-process grader: pytest and unittest prove to the verifier that they were not turned against the tests.

Installed as a pytest plugin and, for unittest, by ``sitecustomize``; loaded before any of the candidate's code. Around the
tests it runs two checks through the runner's own path, one that must pass and one that must fail. It tells the verifier how they
and the tests went, ends what the candidate's code left running, and ends the process itself, so that no handler of the candidate's
comes after. A runner that ends without that word was ended by somebody else. It stands alone; Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
        self._said: dict[str, Any] = {"kind": kind, "nonce": connection.recv(64).decode(), "canaries": [], "whole": True}

    def canaries(self, passed: str, failed: str) -> None:
        """Note the outcomes of the two checks."""
        self._said["canaries"].append([passed, failed])

    def note(self, **said: Any) -> None:
        """Note how the tests went."""
        self._said.update(said)

    def close(self, status: int, end: bool) -> None:
        """Report, and end the process where it is the test runner's own."""
        if os.getpid() != self._pid:
            return
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


def opened(kind: str) -> Line | None:
    """A line to the verifier; None where nobody listens."""
    try:
        return Line(kind) if _ADDRESS in os.environ else None
    except OSError:
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


def pytest_configure(config: Any) -> None:
    """Begin, in the process that collects the tests (not in a worker of pytest-xdist)."""
    if hasattr(config, "workerinput"):
        return
    line = opened("pytest")
    if line is not None:
        main = sys.modules.get("__main__")
        name = getattr(getattr(main, "__spec__", None), "name", "")
        own = name in ("pytest", "pytest.__main__") or os.path.basename(sys.argv[0]) in ("pytest", "py.test")  # noqa: PTH119
        config.pluginmanager.register(Guard(line, own))


class Guard:
    """The plugin of one session."""

    def __init__(self, line: Line, own: bool) -> None:
        import pytest

        self._line, self._own, self._function = line, own, pytest.Function
        self._failures: list[str] = []
        self._passed, self._status = 0, 4
        self.pytest_runtestloop = pytest.hookimpl(hookwrapper=True, tryfirst=True)(self._around)
        self.pytest_sessionfinish = pytest.hookimpl(hookwrapper=True, tryfirst=True)(self._finish)
        self.pytest_unconfigure = pytest.hookimpl(hookwrapper=True, tryfirst=True)(self._leave)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count."""
        if report.failed:
            self._failures.append(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Count."""
        if report.failed:
            self._failures.append(report.nodeid)

    def _around(self, session: Any) -> Any:
        if session.config.option.collectonly:
            self._line.note(whole=False)
            yield
            return
        self._check(session)
        yield
        if session.shouldstop or session.shouldfail:
            self._line.note(whole=False)
        self._check(session)

    def _check(self, session: Any) -> None:
        one, other = numbers()

        def passes() -> None:
            assert one == one + 0

        def fails() -> None:
            assert one == other

        outcomes = [self._outcome(session, check) for check in (passes, fails)]
        self._line.canaries(*outcomes)

    def _outcome(self, session: Any, check: Any) -> str:
        from _pytest.fixtures import FuncFixtureInfo
        from _pytest.runner import runtestprotocol

        stop, failed = session.shouldstop, session.testsfailed
        info = FuncFixtureInfo((), (), [], {})  # no fixture of the tests is made for it
        item = self._function.from_parent(session, name="evener_canary", callobj=check, fixtureinfo=info)
        reports = runtestprotocol(item, log=False, nextitem=None)
        session.shouldstop, session.testsfailed = stop, failed
        return next((report.outcome for report in reports if report.when == "call"), "none")

    def _finish(self, session: Any) -> Any:
        yield
        self._status = session.exitstatus

    def _leave(self, config: Any) -> Any:
        yield
        if self._failures and self._status == 0:
            self._line.note(forged_status=True)
            self._status = 1
        self._line.note(passed=self._passed, failed=len(self._failures), failures=self._failures[:SHOWN])
        capture = config.pluginmanager.getplugin("capturemanager")
        if self._own and capture is not None:
            capture.stop_global_capturing()
        terminal = config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.flush()
        self._line.close(self._status, self._own)


def guarded_unittest() -> Any:
    """The specification of ``unittest.main`` whose loading puts the checks around ``TestProgram``."""
    spec: Any = importlib.util.find_spec("unittest.main")
    execute = spec.loader.exec_module

    def execute_and_guard(module: Any) -> None:
        execute(module)
        guard_unittest(module.TestProgram)

    spec.loader.exec_module = execute_and_guard
    return spec


def guard_unittest(program: Any) -> None:
    """Open a line before the tests are loaded, and close it after they ran, which ends the process as `sys.exit` would."""
    begin, run = program.__init__, program.runTests
    lines: list[Any] = []

    def begun(self: Any, *arguments: Any, **named: Any) -> None:
        lines.append(opened("unittest"))
        begin(self, *arguments, **named)

    def guarded(self: Any) -> None:
        line, own = lines.pop() if lines else None, self.exit
        if line is None:
            run(self)
            return
        _check_unittest(line)
        self.exit = False
        run(self)
        _check_unittest(line)
        result = self.result
        bad = [str(each[0]) for each in (*result.failures, *result.errors)] + [str(each) for each in result.unexpectedSuccesses]
        line.note(passed=result.testsRun - len(bad), failed=len(bad), failures=bad[:SHOWN])
        nothing = 5 if sys.version_info >= (3, 12) and result.testsRun == 0 and not result.skipped else 0
        line.close(1 if bad else nothing, own)

    program.__init__, program.runTests = begun, guarded


def _check_unittest(line: Line) -> None:
    import unittest

    def outcome(check: Any) -> str:
        case = type("EvenerCanary", (unittest.TestCase,), {"runTest": check})()
        result = unittest.TestResult()
        unittest.TestSuite([case]).run(result)
        return "passed" if result.wasSuccessful() and result.testsRun == 1 else "failed"

    one, other = numbers()

    def passes(case: Any) -> None:
        case.assertEqual(one, one + 0)  # noqa: PT009

    def fails(case: Any) -> None:
        case.assertEqual(one, other)  # noqa: PT009

    line.canaries(outcome(passes), outcome(fails))
