"""One port for places to run what is not trusted, its kinds, and what runner and verifier share around them."""

from evener.sandbox.folders import Folder
from evener.sandbox.port import HOME, WORKSPACE, ExecResult, Kind, Limits, Mount, Sandbox, SandboxSpec
from evener.sandbox.probe import choose, create
from evener.sandbox.snapshot import Snapshot

__all__ = [
    "HOME",
    "WORKSPACE",
    "ExecResult",
    "Folder",
    "Kind",
    "Limits",
    "Mount",
    "Sandbox",
    "SandboxSpec",
    "Snapshot",
    "choose",
    "create",
]
