"""The limits that a task asks for, and its workspace, made from ``environment/`` without building an image.

``environment/workspace/`` holds its files; else a Dockerfile's ``COPY`` lines say which files of ``environment/`` go where in
``/workspace``. A line that only a container engine can follow is refused, so that no agent starts in half an environment.
A step of a task adds its ``workdir/``. Called by the runner, and by the verifier, which compares the snapshot with it.
"""

import json
import posixpath
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evener.archive import extract, tar_of_folder
from evener.artifacts import places_of
from evener.errors import TaskError
from evener.sandbox.port import HOME, WORKSPACE, Kind, Limits
from evener.tasks import SETUP, WORKDIR, Step, TaskToml

_WITHOUT_EFFECT = {"FROM", "CMD", "LABEL", "MAINTAINER", "EXPOSE"}


def lay_out(environment: Path, workspace: Path) -> None:
    """Fill the empty folder ``workspace``. Raises TaskError ``task_setup`` that names the line."""
    workspace.mkdir(parents=True, exist_ok=True)
    if (environment / "workspace").is_dir():
        shutil.copytree(environment / "workspace", workspace, dirs_exist_ok=True)
        return
    dockerfile = environment / "Dockerfile"
    if dockerfile.is_file():
        for number, words in _instructions(dockerfile.read_text()):
            try:
                _follow(words, environment, workspace)
            except (ValueError, OSError) as error:
                line = f"environment/Dockerfile line {number}: {' '.join(words)[:80]}"
                raise TaskError("task_setup", f"{line}: {error}; give environment/workspace/ instead") from error


@dataclass(frozen=True, slots=True)
class Added:
    """What a step lays over the workspace before its agent starts, as a tar file, and whether its set-up script runs then."""

    tar: bytes
    sets_up: bool


def added_by(step: Step, task: Path) -> Added | None:
    """A step's ``workdir/``; ``task`` is an unpacked agent side."""
    folder = task / step.place / WORKDIR
    if not step.name or not folder.is_dir():
        return None
    return Added(tar_of_folder(folder), (folder / SETUP).is_file())


def untouched(task: Path, toml: TaskToml, workspace: Path) -> list[bytes]:
    """What an agent that does nothing leaves at each step, made in the new folder ``workspace``; no set-up script is run.

    Raises TaskError, OSError.
    """
    lay_out(task / "environment", workspace)
    left: list[bytes] = []
    for step in toml.each_step():
        added = added_by(step, task)
        if added is not None:
            extract(added.tar, workspace, over=True)
        left.append(tar_of_folder(workspace) if added is not None or not left else left[-1])
    return left


def writable_of(toml: TaskToml, kind: Kind) -> tuple[str, ...]:
    """Where an agent may write. Raises TaskError ``task_setup`` where a sandbox of this kind has no such places."""
    named = places_of(each.source for step in toml.each_step() for each in step.toml.artifacts)
    if named and kind == "process":
        raise TaskError(
            "task_setup", f"artifacts in {', '.join(named)} need a sandbox of kind bubblewrap, and there is none here"
        )
    return (WORKSPACE, HOME, "/tmp", *toml.places)  # noqa: S108 - a path inside


def limits_of(toml: TaskToml) -> Limits:
    """The task's own limits over ours."""
    usual, own = Limits(), toml.environment
    return Limits(
        memory_bytes=usual.memory_bytes if own.memory_mb is None else own.memory_mb << 20,
        pids=usual.pids,
        cpus=own.cpus or usual.cpus,
        file_bytes=usual.file_bytes if own.storage_mb is None else min(own.storage_mb << 20, usual.file_bytes),
    )


def _instructions(text: str) -> Iterator[tuple[int, list[str]]]:
    """The instructions of a Dockerfile with the numbers of their first lines; comments and continued lines resolved."""
    pending: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        first = first if pending else number
        pending.append(stripped.removesuffix("\\"))
        if not stripped.endswith("\\"):
            yield first, " ".join(pending).split()
            pending = []


def _follow(words: list[str], environment: Path, workspace: Path) -> None:
    name, arguments = words[0].upper(), words[1:]
    if name == "WORKDIR":
        if posixpath.normpath("".join(arguments)) != WORKSPACE:
            raise ValueError(f"this sandbox works in {WORKSPACE}")
    elif name == "COPY":
        _copy(arguments, environment, workspace)
    elif name not in _WITHOUT_EFFECT:
        raise ValueError(f"{name} needs a docker sandbox")


def _copy(arguments: list[str], environment: Path, workspace: Path) -> None:
    """``COPY source... target``, sources below the environment, target below the workspace."""
    if arguments and arguments[0].startswith("["):
        arguments = [str(word) for word in json.loads(" ".join(arguments))]
    if len(arguments) < 2 or arguments[0].startswith("--"):
        raise ValueError("only COPY SOURCE... TARGET can be followed")
    *sources, target = arguments
    place = posixpath.normpath(posixpath.join(WORKSPACE, target))
    if place != WORKSPACE and not place.startswith(WORKSPACE + "/"):
        raise ValueError(f"the target is not below {WORKSPACE}")
    destination = workspace / posixpath.relpath(place, WORKSPACE)
    into = target.endswith("/") or len(sources) > 1 or destination.is_dir()
    for pattern in sources:
        inner = posixpath.normpath(pattern.lstrip("/"))
        found = [environment] if inner == "." else sorted(environment.glob(inner))
        if inner.startswith("..") or not found:
            raise ValueError(f"{pattern} is not in environment/")
        for source in found:
            if source.is_dir():
                shutil.copytree(source, destination, dirs_exist_ok=True)
            else:
                file = destination / source.name if into else destination
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, file)
