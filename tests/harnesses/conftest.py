"""These tests install agents and take minutes: they are collected only where ``HARNESSES`` says of which agents."""

import os

import pytest

collect_ignore: list[str] = []
if "HARNESSES" not in os.environ:
    collect_ignore += ["test_task.py", "test_faults.py", "test_slow.py", "test_prompts.py"]
elif os.environ.get("CI") == "true":
    collect_ignore += ["test_slow.py"]  # it waits for 100 s


def pytest_configure(config: pytest.Config) -> None:
    """Without pytest-xdist nobody else knows this mark."""
    config.addinivalue_line("markers", "xdist_group(name): tests of one worker")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test for which no agent was selected is none, not a skipped one."""
    nobody = [item for item in items if "[NOTSET]" in item.nodeid]
    if nobody:
        config.hook.pytest_deselected(items=nobody)
        items[:] = [item for item in items if item not in nobody]
