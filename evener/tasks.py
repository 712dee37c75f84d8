"""A task is a directory in the Harbor format; it leaves the user's machine as two bundles, and an agent sees only the first.

Agent side: ``task.toml``, ``environment/`` and of each step ``instruction.md`` and ``workdir/``. Grader side: ``task.toml``,
``tests/``, ``solution/`` and those of each step. A task without ``[[steps]]`` is one step, in the task's own folder. Bundles
are tar files whose bytes depend on content alone, so that the same task has the same digest on every machine. Errors name
file and field. Read by the command line (submission), the runner and the verifier (unpacking).
"""

import io
import math
import tarfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from evener.archive import extract
from evener.artifacts import CONVENTION, place_of, places_of
from evener.blobs import digest_of
from evener.errors import InputError

INSTRUCTION = "instruction.md"
WORKDIR = "workdir"
SETUP = "setup.sh"
"""In a step's ``workdir/``: run before the step's agent starts."""
MAX_BUNDLE_BYTES = 256 << 20
MAX_STEPS = 32
"""A rollout's evidence has a part for each step, and its snapshot a share."""

Tier = Literal["out_of_process", "in_process"]
"""Whether a task's grader keeps the candidate's code out of its own sandbox (docs/verifier.md)."""
Strategy = Literal["mean", "final"]
"""How the scores of steps become those of the rollout: their mean by name, or the last."""

_NOT_BUILT = (
    "no image is built when a grader is needed: build it ahead of time, and name it by verifier.environment.docker_image"
)
_RECIPES = ("Dockerfile", "docker-compose.yaml")

_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._-]*([/:@][A-Za-z0-9][A-Za-z0-9._-]*)*$"
"""The name of an image, which is a path on the verifier's host too: nothing in it leads up or to the root."""


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

    docker_image: Annotated[str, Field(pattern=_IMAGE, max_length=255)] | None = None


class VerifierTable(_Table):
    """``[verifier]``; docs/verifier.md says what each key means."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: GraderEnvironmentTable | None = None
    tier: Tier = "in_process"
    timeout_reward: float | None = Field(default=None, ge=0, le=1)
    ranges: dict[str, tuple[float, float]] = {}
    collect: tuple[object, ...] = ()
    protect: tuple[str, ...] | None = None
    baseline: bool = False

    @field_validator("user")
    @classmethod
    def _is_the_agents(cls, user: str | int | None) -> str | int | None:
        if user not in (None, "agent", "root", 0):
            raise ValueError(f"{user!r}: a grader's sandbox has the users 'agent' and 'root', and no other")
        return user

    @field_validator("collect")
    @classmethod
    def _is_none(cls, commands: tuple[object, ...]) -> tuple[object, ...]:
        if commands:
            raise ValueError("no commands are run between agent and grader; let tests/test.sh do what they do")
        return commands

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

    @property
    def as_root(self) -> bool:
        """Whether the grader is to be the root of its sandbox."""
        return self.user in ("root", 0)

    @property
    def image(self) -> str | None:
        """The image that the grader runs in, if it has one of its own."""
        return self.environment.docker_image if self.environment is not None else None


class ArtifactTable(_Table):
    """One of ``artifacts``; where it is a string that is its ``source``."""

    source: str
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _is_somewhere(cls, source: str) -> str:
        place_of(source)
        return source

    @field_validator("service")
    @classmethod
    def _is_the_agents(cls, service: str | None) -> str | None:
        if service not in (None, "main"):
            raise ValueError(f"{service!r}: there are no services beside the agent's sandbox")
        return service


Artifacts = tuple[
    Annotated[ArtifactTable, BeforeValidator(lambda said: {"source": said} if isinstance(said, str) else said)], ...
]


StepName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class StepTable(_Table):
    """One of ``[[steps]]``: what it says of agent and verifier goes before what the task says."""

    name: StepName
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    artifacts: Artifacts = ()


class TaskToml(_Table):
    """``task.toml``."""

    schema_version: str = "1.4"
    metadata: dict[str, object] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    verify: str | None = Field(default=None, min_length=1)
    artifacts: Artifacts = ()
    steps: tuple[StepTable, ...] = Field(default=(), max_length=MAX_STEPS)
    multi_step_reward_strategy: Strategy = "mean"

    @model_validator(mode="after")
    def _steps_are_sound(self) -> Self:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError(f"steps: two have one name: {', '.join(names)}")
        self.each_step()
        return self

    @property
    def collected(self) -> Artifacts:
        """``artifacts``, and with a separate environment what Harbor collects without being asked to."""
        declared = any(each.source.rstrip("/") == CONVENTION for each in self.artifacts)
        return self.artifacts if declared or not self.verifier.separate else (*self.artifacts, ArtifactTable(source=CONVENTION))

    @property
    def places(self) -> tuple[str, ...]:
        """The folders outside of the workspace where artifacts of any step lie; a snapshot holds them too."""
        return places_of(each.source for step in self.each_step() for each in step.toml.collected)

    def each_step(self) -> list["Step"]:
        """The steps in their order; a task that has none is one."""
        if not self.steps:
            return [Step("", self, {})]
        return [self._step(table) for table in self.steps]

    def _step(self, table: StepTable) -> "Step":
        agent = self.agent.model_copy(update=table.agent.model_dump(exclude_unset=True))
        artifacts = (*self.artifacts, *table.artifacts)
        changed = {"agent": agent, "verifier": self._verifier_of(table.verifier), "artifacts": artifacts, "steps": ()}
        toml = self.model_copy(update=changed)
        least = table.min_reward if isinstance(table.min_reward, dict) else {"reward": table.min_reward}
        return Step(table.name, toml, {name: value for name, value in least.items() if value is not None})

    def _verifier_of(self, own: VerifierTable) -> VerifierTable:
        """The verifier of a step, whose own table goes before the task's key by key; ``env`` and image as in Harbor."""
        usual, update = self.verifier, {name: getattr(own, name) for name in own.model_fields_set}
        update["env"] = usual.env | own.env
        if own.environment_mode is None and own.environment is not None:
            update["environment_mode"] = "separate"
        if own.environment_mode == "shared":
            update["environment"] = None
        elif own.environment is not None and own.image is None and usual.image is not None:
            update["environment"] = own.environment.model_copy(update={"docker_image": usual.image})
        return usual.model_copy(update=update)


@dataclass(frozen=True)
class Step:
    """What an agent is asked for at once and is scored by: one of ``[[steps]]``, or all of a task that has none (``name`` "").

    ``toml`` is the task's with the step's own keys over it; ``min_reward`` is what its scores must reach, by name, for the
    steps after it to count.
    """

    name: str
    toml: TaskToml
    min_reward: dict[str, float]

    @property
    def place(self) -> Path:
        """Its folder, relative to the task's."""
        return Path("steps", self.name) if self.name else Path()


@dataclass(frozen=True)
class Task:
    """A task directory that was read and found whole; ``instruction`` has those of all steps, one after the other."""

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
    instructions = read_instructions(folder, toml)
    if not (folder / "environment").exists():
        raise InputError("task_invalid", f"{folder / 'environment'}: is missing")
    for step in toml.each_step():
        tests = (folder / "tests", folder / step.place / "tests")
        image = step.toml.verifier.image
        if not (image or toml.verify or any((each / "test.sh").exists() for each in tests)):
            raise InputError("task_invalid", f"{tests[-1] / 'test.sh'}: is missing")
        for recipe in [each / name for each in tests for name in _RECIPES if step.toml.verifier.separate and image is None]:
            if recipe.exists():
                raise InputError("task_invalid", f"{recipe}: {_NOT_BUILT}")
    return Task(folder.name, folder, toml, "\n\n".join(text.strip() for text in instructions) + "\n")


def read_instructions(folder: Path, toml: TaskToml) -> list[str]:
    """What the agent is told, a text a step; also of an unpacked agent side. Raises InputError that names the file."""
    texts: list[str] = []
    for step in toml.each_step():
        path = folder / step.place / INSTRUCTION
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError("task_invalid", f"{path}: {error}") from error
        if not text.strip():
            raise InputError("task_invalid", f"{path}: is empty")
        texts.append(text)
    return texts


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
        parts = [str(path), ".".join(str(part) for part in fault["loc"]), fault["msg"]]
        raise InputError("task_invalid", ": ".join(part for part in parts if part)) from error


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
    names = (INSTRUCTION, WORKDIR) if task.toml.steps else (INSTRUCTION,)
    return pack(task.folder, ("task.toml", *_of_steps(task.toml, names), "environment"))


def grader_bundle(task: Task) -> bytes:
    """What only a verifier may see of a task, as a tar file."""
    common = ("tests",) if task.toml.steps else ()
    return pack(task.folder, ("task.toml", *common, *_of_steps(task.toml, ("tests", "solution"))))


def _of_steps(toml: TaskToml, names: tuple[str, ...]) -> list[str]:
    return [str(step.place / name) for step in toml.each_step() for name in names]


def task_digest(agent: bytes, grader: bytes) -> str:
    """A task's identity beside its id: the digest of both bundles."""
    return digest_of((digest_of(agent) + digest_of(grader)).encode())


def pack(folder: Path, names: Iterable[str]) -> bytes:
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
