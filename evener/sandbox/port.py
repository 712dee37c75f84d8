"""What every kind of sandbox keeps: a command that returned or was killed has left nothing running.

The runner puts an agent into one, the verifier a task's tests; both see this port alone. Paths are those inside: work
happens in ``/workspace``, ``HOME`` is ``/home/agent``. A kind that cannot place them says where they are (`locate`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from evener.sandbox.folders import Folder
from evener.sandbox.snapshot import MAX_BYTES, Snapshot

Kind = Literal["bubblewrap", "process"]

WORKSPACE = "/workspace"
HOME = "/home/agent"
FORWARDER_PORT = 8701
OUTPUT_LIMIT = 256 << 10
"""Bytes kept of each of stdout and stderr: the screens show the end of it, and a rollout's log stays small."""


_RESERVED_BYTES = 1 << 30
"""What a runtime reserves without using it: pi under Node 24 does not start with 512 MiB in all, and does with 640."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What all processes of a sandbox may use together (under rlimits: each one; `cgroups`)."""

    memory_bytes: int = 2 << 30
    pids: int = 512
    cpus: float = 2.0
    file_bytes: int = 1 << 30
    """Of one file: what a command may write in all is not bounded."""

    @property
    def data_bytes(self) -> int:
        """RLIMIT_DATA where it stands in for a limit of memory: it counts what is reserved and never touched, too."""
        return self.memory_bytes + _RESERVED_BYTES


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host, read-only at ``target`` inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """All that is decided before a sandbox exists.

    ``folder`` holds what is written and dies with the sandbox. ``writable`` are the folders inside, empty at first.
    ``proxy_url`` is the one place that the sandbox may reach; None: no place at all. ``root`` is a root filesystem that stands
    in for the host's system, and ``as_root`` makes a command user 0 of a namespace of users (both: bubblewrap alone, and
    the latter not where root runs it).
    """

    folder: Folder
    mounts: tuple[Mount, ...] = ()
    writable: tuple[str, ...] = (WORKSPACE, HOME, "/tmp")  # noqa: S108 - a path inside
    env: dict[str, str] = field(default_factory=dict[str, str])
    limits: Limits = Limits()
    proxy_url: str | None = None
    root: Path | None = None
    as_root: bool = False


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. ``exit_code`` is 128 + the signal where one killed it; ``seconds`` are wall time."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float


class Sandbox(Protocol):
    """A place to run commands that are not trusted. Errors are InfraError ``sandbox_failed``."""

    @property
    def kind(self) -> Kind:
        """What contains it."""
        ...

    @property
    def proxy_url(self) -> str | None:
        """The proxy as a command inside reaches it."""
        ...

    @property
    def proxy_lost(self) -> bool:
        """Whether what ran inside could not reach the proxy in the end: its failure is then none of its own."""
        ...

    def locate(self, path: str) -> str:
        """``path`` as a command inside sees it: itself, except under ``process``."""
        ...

    async def exec(
        self,
        argv: list[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> ExecResult:
        """Run a command to its end; after ``timeout`` seconds kill it. Nothing it started outlives it."""
        ...

    async def upload(self, tar: bytes, path: str, *, over: bool = False) -> None:
        """Unpack ``tar`` into the writable folder ``path``, owned by the user inside; ``over`` what is in its way there."""
        ...

    async def read(self, path: str, *, limit: int) -> bytes | None:
        """The first ``limit`` bytes of a regular file directly below a writable folder; None where there is none."""
        ...

    async def modes(self, path: str) -> dict[str, int]:
        """``st_mode`` by name of what lies directly below the writable folder ``path``, and of itself as ``"."``."""
        ...

    async def snapshot(self, path: str, *, max_bytes: int = MAX_BYTES) -> Snapshot:
        """Archive the writable folder ``path``; call it when nothing runs."""
        ...

    async def kill(self) -> None:
        """Kill whatever runs; the `exec` in progress returns."""
        ...

    async def destroy(self) -> None:
        """Kill, and remove every trace. Idempotent."""
        ...
