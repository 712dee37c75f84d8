"""A task is a directory in the Harbor format; it leaves the user's machine as two bundles, and an agent sees only the first.

Agent side: ``task.toml``, ``instruction.md``, ``environment/``. Grader side: ``task.toml``, ``tests/``, ``solution/``. Bundles
are tar files whose bytes depend on content alone, so that the same task has the same digest on every machine. Errors name
file and field. Read by the command line (submission), the runner and the verifier (unpacking).
"""

import io
import math
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evener.archive import extract
from evener.blobs import digest_of
from evener.errors import InputError

AGENT_SIDE = ("task.toml", "instruction.md", "environment")
GRADER_SIDE = ("task.toml", "tests", "solution")
MAX_BUNDLE_BYTES = 256 << 20

Tier = Literal["out_of_process", "in_process"]
"""Whether a task's grader keeps the candidate's code out of its own sandbox (docs/verifier.md)."""


class _Table(BaseModel):
    # Harbor adds keys with each version: what Evener does not use is let through.
    model_config = ConfigDict(extra="ignore", frozen=True)


class AgentTable(_Table):
    """``[agent]``."""

    timeout_sec: float | None = Field(default=None, gt=0)


class EnvironmentTable(_Table):
    """``[environment]``: limits of the sandbox."""

    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)


class GraderEnvironmentTable(EnvironmentTable):
    """``[verifier.environment]``: limits of the grader's sandbox, where it is not the agent's environment."""

    docker_image: str | None = None

    @field_validator("docker_image")
    @classmethod
    def _is_none(cls, image: str | None) -> str | None:
        if image is not None:
            raise ValueError("a separate image needs a docker sandbox, which this version does not have")
        return image


class VerifierTable(_Table):
    """``[verifier]``; docs/verifier.md says what each key means."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    user: Literal["agent"] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: GraderEnvironmentTable | None = None
    tier: Tier = "in_process"
    timeout_reward: float | None = Field(default=None, ge=0, le=1)
    ranges: dict[str, tuple[float, float]] = {}
    protect: tuple[str, ...] | None = None
    baseline: bool = False

    @field_validator("ranges")
    @classmethod
    def _are_ranges(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in ranges.items():
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(f"{name}: [{low}, {high}] is no range of finite numbers")
        return ranges

    @model_validator(mode="after")
    def _one_mode(self) -> Self:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError("environment_mode 'shared' has no environment of its own")
        return self

    @property
    def separate(self) -> bool:
        """Whether the grader finds the artifacts only; as in Harbor, an environment of its own implies it."""
        return self.environment_mode == "separate" or self.environment is not None


class ArtifactTable(_Table):
    """One of ``artifacts`` where it is a table."""

    source: str


class TaskToml(_Table):
    """``task.toml``."""

    schema_version: str = "1.4"
    metadata: dict[str, object] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    verify: str | None = Field(default=None, min_length=1)
    artifacts: tuple[str | ArtifactTable, ...] = ()
    steps: tuple[dict[str, object], ...] = ()

    @field_validator("steps")
    @classmethod
    def _are_none(cls, steps: tuple[dict[str, object], ...]) -> tuple[dict[str, object], ...]:
        if steps:
            raise ValueError("an agent is given one instruction; make a task of each step")
        return steps

    @property
    def artifact_paths(self) -> list[str]:
        """The sources of ``artifacts``."""
        return [each if isinstance(each, str) else each.source for each in self.artifacts]


@dataclass(frozen=True)
class Task:
    """A task directory that was read and found whole."""

    id: str
    folder: Path
    toml: TaskToml
    instruction: str

    @property
    def family(self) -> str:
        """``metadata.category``, by which results are shown; "" where the task has none."""
        return str(self.toml.metadata.get("category", ""))


def read_task(folder: Path) -> Task:
    """Read one task directory. Raises InputError that names file and field."""
    toml = read_toml(folder / "task.toml")
    try:
        instruction = (folder / "instruction.md").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("task_invalid", f"{folder / 'instruction.md'}: {error}") from error
    if not instruction.strip():
        raise InputError("task_invalid", f"{folder / 'instruction.md'}: is empty")
    for name in ("environment",) if toml.verify else ("environment", "tests/test.sh"):
        if not (folder / name).exists():
            raise InputError("task_invalid", f"{folder / name}: is missing")
    return Task(folder.name, folder, toml, instruction)


def read_toml(path: Path) -> TaskToml:
    """Read a ``task.toml``. Raises InputError that names file and field."""
    try:
        return TaskToml.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise InputError("task_invalid", f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("task_invalid", f"{path}: {error}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        raise InputError("task_invalid", f"{path}: {field}: {fault['msg']}") from error


def read_tasks(folder: Path) -> list[Task]:
    """All tasks below ``folder`` (or the one that it is), in the order of their names. Raises InputError."""
    return [read_task(child) for child in task_folders(folder)]


def task_folders(folder: Path) -> list[Path]:
    """The task directories below ``folder`` (or itself, where it is one), in the order of their names. Raises InputError."""
    if (folder / "task.toml").exists():
        return [folder]
    if not folder.is_dir():
        raise InputError("task_invalid", f"{folder}: is not a folder of tasks")
    found = [child for child in sorted(folder.iterdir()) if child.is_dir() and child.name[0] != "."]
    if not found:
        raise InputError("task_invalid", f"{folder}: holds no task directory")
    return found


def agent_bundle(task: Task) -> bytes:
    """What an agent's host may see of a task, as a tar file."""
    return pack(task.folder, AGENT_SIDE)


def grader_bundle(task: Task) -> bytes:
    """What only a verifier may see of a task, as a tar file."""
    return pack(task.folder, GRADER_SIDE)


def task_digest(agent: bytes, grader: bytes) -> str:
    """A task's identity beside its id: the digest of both bundles."""
    return digest_of((digest_of(agent) + digest_of(grader)).encode())


def pack(folder: Path, names: tuple[str, ...]) -> bytes:
    """A tar file of the named files and folders; owner, time and order carry no information."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            top = folder / name
            paths = [top, *sorted(top.rglob("*"))] if top.exists() else []
            for path in paths:
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise InputError("task_invalid", f"{path}: only files and folders can be bundled")
                info = archive.gettarinfo(path, arcname=str(path.relative_to(folder)))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mtime = 0
                info.mode = 0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644
                if path.is_file():
                    with path.open("rb") as content:
                        archive.addfile(info, content)
                else:
                    archive.addfile(info)
    if buffer.tell() > MAX_BUNDLE_BYTES:
        raise InputError("task_invalid", f"{folder}: the bundle is over {MAX_BUNDLE_BYTES >> 20} MiB")
    return buffer.getvalue()


def unpack(bundle: bytes, folder: Path) -> None:
    """Unpack a bundle; links out of the folder, devices and absolute paths are refused. Raises tarfile.TarError, OSError."""
    extract(bundle, folder)
