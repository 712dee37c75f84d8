"""`evener doctor`: one line for each thing that a run needs here, and for each that is missing the remedy.

It changes nothing that stays and needs nothing to run; its exit code is 1 when something that a run needs is missing.
"""

import asyncio
import importlib.util
import shutil
import socket
import sys

from evener.cli import embedded
from evener.cli.check import Check
from evener.cli.stores import examine_stores
from evener.sandbox.probe import bubblewrap_missing
from evener.settings import Settings


def examine(settings: Settings) -> list[Check]:
    """All checks, in the order in which a run meets them."""
    return [
        _python(),
        *_extras(),
        _sandbox(),
        *_harnesses(settings),
        *_ports(settings),
        _disk(settings),
        *examine_stores(settings),
    ]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok" if sys.version_info >= (3, 11) else "missing", version)


def _extras() -> list[Check]:
    needed = {
        "proxy": "fastapi",
        "orchestrator": "sqlalchemy",
        "engine": "torch",
        "learner": "trl",
    }
    return [
        Check(f"extra {extra}", "ok", module)
        if importlib.util.find_spec(module)
        else Check(f"extra {extra}", "missing", f"pip install 'evener[{extra}]'")
        for extra, module in needed.items()
    ]


def _sandbox() -> Check:
    problem = asyncio.run(bubblewrap_missing())
    if problem is None:
        return Check("sandbox", "ok", "bubblewrap")
    return Check("sandbox", "note", f"agents run without isolation: {problem}")


def _harnesses(settings: Settings) -> list[Check]:
    rows: list[Check] = []
    for name, harness in embedded.harnesses().items():
        there = embedded.harness_installed(settings, name)
        detail = harness.version if there else f"evener harnesses install {name} (a run does it by itself)"
        rows.append(Check(f"harness {name}", "ok" if there else "note", detail))
    return rows


def _ports(settings: Settings) -> list[Check]:
    ports = {
        "api": settings.api_port,
        "proxy": settings.proxy_port,
        "admin": settings.admin_port,
        "engine": settings.engine_port,
    }
    rows: list[Check] = []
    for name, port in ports.items():
        with socket.socket() as probe:
            probe.settimeout(0.5)
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        remedy = f"{port} is taken: a stack runs, or set EVENER_{name.upper()}_PORT"
        rows.append(Check(f"port {name}", "note" if taken else "ok", remedy if taken else str(port)))
    return rows


def _disk(settings: Settings) -> Check:
    folder = settings.data.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free >> 30
    return Check("disk", "ok" if free >= 2 else "missing", f"{free} GiB free at {folder}")
