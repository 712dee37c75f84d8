"""The guard around unittest; see the package."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from .line import SHOWN, Line, numbers, opened


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
