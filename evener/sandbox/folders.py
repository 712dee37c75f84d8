"""A sandbox's folder carries a label that says whose it is, so that a reaper needs to ask no other service.

`Folder.make` writes the label before anything else; `reap` removes the folders whose owner is dead or whose time is over.
A process is named by its id and start time within one process namespace of one boot: on another host or in another
container only the expiry speaks. Used by the sandboxes and by the reaper of runner and verifier.
"""

import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.removal import remove

LABEL = "label.json"
UNLABELLED_GRACE_S = 60.0
"""A folder without a label is being made, or its maker died within the microseconds between; a minute tells which."""
_KILL_PASSES = 20
_KILL_PAUSE_S = 0.02
"""A process that is killed while it makes another leaves one that the pass before did not see."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one sandbox on the host."""

    path: Path

    @staticmethod
    def make(root: Path, name: str, *, ttl_s: float) -> "Folder":
        """Make ``root/name`` (0700), labelled as this process's for ``ttl_s`` seconds; a left-over is removed first."""
        folder = Folder(root.absolute() / name)
        folder.remove()
        folder.path.mkdir(parents=True, mode=0o700)
        label = {"namespace": _namespace(), "pid": os.getpid(), "started": _started(os.getpid())}
        folder._label(label | {"expires": time.time() + ttl_s, "cgroups": [], "outside": []})
        return folder

    def add_cgroups(self, paths: list[Path]) -> None:
        """Note cgroups that have to go with the folder."""
        label = json.loads((self.path / LABEL).read_text())
        self._label(label | {"cgroups": [str(path) for path in paths]})

    def make_outside(self) -> Path:
        """A folder in the system's temporary folder that goes with this one: no project's files lie above it."""
        path = Path(tempfile.gettempdir()).absolute() / f"evener-{secrets.token_hex(4)}"
        label = json.loads((self.path / LABEL).read_text())
        self._label(label | {"outside": [*label["outside"], str(path)]})
        path.mkdir(mode=0o700)
        return path

    def remove(self) -> None:
        """Remove the folder whatever modes its contents have, and what belongs to it outside. Idempotent."""
        for path in self._noted("outside"):
            remove(path)
        remove(self.path)

    def over(self) -> bool:
        """Whether the owner is dead or the time is over."""
        try:
            label = json.loads((self.path / LABEL).read_text())
            expires, namespace, pid, started = (label[name] for name in ("expires", "namespace", "pid", "started"))
        except (OSError, ValueError, KeyError):
            return time.time() - self.path.stat().st_mtime > UNLABELLED_GRACE_S
        return time.time() > expires or (namespace == _namespace() and _started(pid) != started)

    def cgroups(self) -> list[Path]:
        """The cgroups that were noted."""
        return self._noted("cgroups")

    def _noted(self, name: str) -> list[Path]:
        try:
            return [Path(path) for path in json.loads((self.path / LABEL).read_text())[name]]
        except (OSError, ValueError, KeyError):
            return []

    def _label(self, label: dict[str, Any]) -> None:
        part = self.path / f"{LABEL}.part"
        part.write_text(json.dumps(label))
        part.rename(self.path / LABEL)


def reap(root: Path, *, remove_cgroup: Callable[[Path], None]) -> list[str]:
    """Remove the sandboxes below ``root`` that are over; returns their names."""
    reaped: list[str] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        folder = Folder(path)
        if path.is_dir() and folder.over():
            kill_marked(folder)
            for cgroup in folder.cgroups():
                remove_cgroup(cgroup)
            folder.remove()
            reaped.append(path.name)
    return reaped


def kill_marked(folder: Folder) -> None:
    """Kill the processes that have the folder's path as an argument.

    bubblewrap dies with its owner, and its processes with it; but where that happens in the milliseconds in which it makes its
    namespaces, the first process waits for ever for the word to go on.
    """
    for _ in range(_KILL_PASSES):
        marked = _marked(os.fsencode(folder.path))
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not marked:
            return
        time.sleep(_KILL_PAUSE_S)


def _marked(mark: bytes) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _namespace() -> str:
    """The boot and process namespace in which a process id means something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot (field 22 of proc(5)'s stat); None where it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
