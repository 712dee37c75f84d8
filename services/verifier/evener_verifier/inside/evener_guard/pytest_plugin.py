"""pytest's plugin of the guard; see the package. It is imported by pytest itself, whatever version that is."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .line import SHOWN, Line, numbers, opened

pytest: Any = importlib.import_module("pytest")
fixtures: Any = importlib.import_module("_pytest.fixtures")
runner: Any = importlib.import_module("_pytest.runner")


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
        self._line, self._own = line, own
        self._failures: list[str] = []
        self._passed, self._status = 0, 4

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

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> Any:
        """Check before and after."""
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
        stop, failed = session.shouldstop, session.testsfailed
        info = fixtures.FuncFixtureInfo((), (), [], {})  # no fixture of the tests is made for it
        item = pytest.Function.from_parent(session, name="evener_canary", callobj=check, fixtureinfo=info)
        reports = runner.runtestprotocol(item, log=False, nextitem=None)
        session.shouldstop, session.testsfailed = stop, failed
        return next((report.outcome for report in reports if report.when == "call"), "none")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> Any:
        """Take the exit status that all agreed upon."""
        yield
        self._status = session.exitstatus

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_unconfigure(self, config: Any) -> Any:
        """Report, when all others are through."""
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
