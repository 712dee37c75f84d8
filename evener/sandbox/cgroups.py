"""Where the host lets us, a cgroup bounds all processes of a sandbox together; else rlimits bound each one.

Version 1 (a hierarchy a controller) and 2 (one for all) are both tried below the cgroup that this process is in, or the
nearest one it may write to. `find` tells which; nothing is assumed of the host. Called by the bubblewrap sandbox.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from evener.sandbox.port import Limits

ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_SHARES = 8 * 1024
"""Under version 1 all sandboxes together would weigh no more than one process beside them: let them weigh as much as eight,
the number of agents that a runner runs at once."""
_UNBOUND = {
    "memory.memsw.limit_in_bytes": "-1",  # before the next, which is never above it
    "memory.limit_in_bytes": "-1",
    "memory.max": "max",
    "cpu.cfs_quota_us": "-1",
    "cpu.max": f"max {_PERIOD_US}",
}
_REMOVE_S = 1.0
"""A cgroup can be removed when its last process is gone from the kernel's lists, shortly after its death."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroups of one sandbox: three under version 1, one under version 2."""

    paths: list[Path]

    def add(self, pid: int) -> None:
        """Move a process in; its children are born there."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    @contextlib.contextmanager
    def loosened(self) -> Generator[None]:
        """Take the bounds of memory and processor off: what is killed at its bounds may need minutes to die."""
        taken: list[tuple[Path, str]] = []
        for name, none in _UNBOUND.items():
            for file in (path / name for path in self.paths):
                with contextlib.suppress(OSError):
                    taken.append((file, file.read_text()))
                    file.write_text(none)
        try:
            yield
        finally:
            for file, value in reversed(taken):
                with contextlib.suppress(OSError):
                    file.write_text(value)

    def remove(self) -> None:
        """Kill what is left and remove them. Idempotent."""
        for path in self.paths:
            remove(path)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A place where cgroups can be made. ``bases``: one folder a controller under version 1, one in all under version 2."""

    version: int
    bases: dict[str, Path]

    def make(self, name: str, limits: Limits) -> Cgroup:
        """Cgroups called ``name``. Raises OSError."""
        cgroup = Cgroup([base / name for base in dict.fromkeys(self.bases.values())])
        for path in cgroup.paths:
            path.mkdir(exist_ok=True)
        for controller, base in self.bases.items():
            for file, value in self._settings(controller, limits):
                with contextlib.suppress(FileNotFoundError):  # swap accounting may be off
                    (base / name / file).write_text(value)
        return cgroup

    def _settings(self, controller: str, limits: Limits) -> list[tuple[str, str]]:
        memory, quota = str(limits.memory_bytes), str(int(limits.cpus * _PERIOD_US))
        match self.version, controller:
            case _, "pids":
                return [("pids.max", str(limits.pids))]
            case 1, "memory":
                return [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)]
            case 1, _:
                return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", quota)]
            case _, "memory":
                return [("memory.max", memory), ("memory.swap.max", "0")]
            case _:
                return [("cpu.max", f"{quota} {_PERIOD_US}")]


def remove(path: Path) -> None:
    """Kill the processes of one cgroup and remove it, within a second. Idempotent."""
    deadline = time.monotonic() + _REMOVE_S
    while path.is_dir():
        with contextlib.suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.002)


def find(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Hierarchy | None:
    """Where this process may limit others; None where it may not."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    hierarchy = _hierarchy(root, lines)
    return hierarchy if hierarchy is not None and _joins(hierarchy) else None


def _hierarchy(root: Path, lines: list[list[str]]) -> Hierarchy | None:
    places = {controller: path for _, names, path in lines for controller in names.split(",")}
    if (root / "cgroup.controllers").exists():
        return _version2(root, places.get("", "/"))
    return _version1(root, places)


def _version1(root: Path, places: dict[str, str]) -> Hierarchy | None:
    bases: dict[str, Path] = {}
    for controller in _CONTROLLERS:
        inside = root / controller / places.get(controller, "/").lstrip("/")
        # In a container the path names the host's hierarchy, but the mount shows ours at its root.
        base = _usable(inside if inside.is_dir() else root / controller, _holds("cgroup.procs"))
        if base is None:
            return None
        bases[controller] = base
    with contextlib.suppress(OSError):
        (bases["cpu"] / "cpu.shares").write_text(str(_SHARES))
    return Hierarchy(1, bases)


def _version2(root: Path, place: str) -> Hierarchy | None:
    inside = root / place.lstrip("/")
    for parent in [inside, *inside.parents]:
        if parent == root.parent:
            break
        base = _usable(parent, _delegates)
        if base is not None:
            return Hierarchy(2, dict.fromkeys(_CONTROLLERS, base))
    return None


def _joins(hierarchy: Hierarchy) -> bool:
    """Whether we may move a process in: a user may make cgroups and still not be allowed to leave his session's."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    name = f"probe-{process.pid}"
    try:
        hierarchy.make(name, Limits()).add(process.pid)
    except OSError:
        return False
    finally:
        process.kill()
        process.communicate()
        for base in hierarchy.bases.values():
            remove(base / name)
    return True


def _holds(file: str) -> Callable[[Path], bool]:
    return lambda base: (base / file).exists()


def _delegates(base: Path) -> bool:
    """Hand the controllers on to the children of ``base``, which no process is in."""
    (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
    return True


def _usable(parent: Path, check: Callable[[Path], bool]) -> Path | None:
    """The folder ``evener`` below ``parent``, if we may make it and children in it."""
    base = parent / "evener"
    try:
        base.mkdir(exist_ok=True)
        if check(base):
            (base / f"probe-{os.getpid()}").mkdir(exist_ok=True)
            (base / f"probe-{os.getpid()}").rmdir()
            return base
        base.rmdir()
    except OSError:
        pass
    return None
