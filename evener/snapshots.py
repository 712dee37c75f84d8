"""What an attempt leaves is one blob: the archived workspace, or a tar file of such archives.

There is one for each step of a task, and one for each folder outside of the workspace where its artifacts lie. Made by the
runner (and by `evener tasks check`), taken apart by the verifier; all else hands digests on. Each archive is as
`evener.sandbox.snapshot` made it, so its reader need not trust its maker.
"""

import io
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.errors import TaskError
from evener.sandbox import WORKSPACE, Sandbox
from evener.sandbox.initial import Added
from evener.sandbox.snapshot import MAX_BYTES, Snapshot
from evener.tasks import SETUP, WORKDIR, TaskToml

SETUP_S = 300.0
"""How long a set-up script may take, which an agent's budget does not limit where its step is not begun."""


@dataclass(frozen=True, slots=True)
class Left:
    """What one step leaves, as tar files: the workspace, and by their paths the folders outside of it (`TaskToml.places`)."""

    workspace: bytes
    outside: dict[str, bytes] = field(default_factory=dict[str, bytes])


class Workspaces:
    """The workspace of one sandbox, step by step: what a step adds is laid over it, and what the step leaves is archived.

    ``additions``: `added_by`, for each step. All archives share the size that a snapshot may have equally. The sandbox has the
    task's places.
    """

    def __init__(self, sandbox: Sandbox, toml: TaskToml, additions: Sequence[Added | None]) -> None:
        self._sandbox = sandbox
        self._toml = toml
        self._additions = additions
        self._places = toml.places
        self._begun = 0
        self._left: list[Left] = []
        self._left_out: list[str] = []
        self.failures: list[str] = []
        """Set-up scripts that failed in what an agent had left, and how; whose fault that is cannot be known here."""

    async def begin(self) -> None:
        """Begin the next step; nothing runs. Raises InfraError; TaskError where a set-up script fails before any agent ran."""
        number = self._begun
        added = self._additions[number]
        self._begun += 1
        if added is None:
            return
        await self._sandbox.upload(added.tar, WORKSPACE, over=True)
        failure = await self._set_up(number) if added.sets_up else None
        if failure is not None and number == 0:
            raise TaskError("task_setup", failure)
        if failure is not None:
            self.failures.append(failure)

    async def end(self) -> None:
        """Archive what the step left; nothing runs. Raises InfraError."""
        name = self._toml.each_step()[len(self._left)].name
        room = MAX_BYTES // (len(self._additions) * (1 + len(self._places)))
        taken = {place: await self._sandbox.snapshot(place, max_bytes=room) for place in (WORKSPACE, *self._places)}
        for place, each in taken.items():
            where = "".join(f"{part}: " for part in (name, "" if place == WORKSPACE else place) if part)
            self._left_out += [where + line for line in each.left_out]
        workspace = taken.pop(WORKSPACE).tar
        self._left.append(Left(workspace, {place: each.tar for place, each in taken.items()}))

    async def finish(self) -> Snapshot:
        """The blob. A step that is still to end, or to begin, finds and leaves the workspace as it is. Raises as `begin`."""
        while len(self._left) < len(self._additions):
            if self._begun == len(self._left):
                await self.begin()
            await self.end()
        return Snapshot(join(self._toml, self._left), self._left_out)

    async def _set_up(self, number: int) -> str | None:
        """Run a step's set-up script as its agent would; how it failed."""
        shell = "bash" if shutil.which("bash") else "sh"
        result = await self._sandbox.exec([shell, self._sandbox.locate(f"{WORKSPACE}/{SETUP}")], timeout=SETUP_S)
        if result.exit_code == 0 and not result.timed_out:
            return None
        script = self._toml.each_step()[number].place / WORKDIR / SETUP
        how = f"did not end within {SETUP_S:g} s" if result.timed_out else f"ended with {result.exit_code}"
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        return f"{script} {how}" + (f": {lines[-1][:200]}" if lines else "")


def join(toml: TaskToml, left: Sequence[Left]) -> bytes:
    """One blob of what all steps left, in their order. Its bytes depend on that alone."""
    names = _names(toml)
    if names is None:
        return left[0].workspace
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for each, members in zip(left, names, strict=True):
            for place, name in members.items():
                content = each.workspace if place == WORKSPACE else each.outside[place]
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def split(toml: TaskToml, blob: bytes) -> list[Left]:
    """What all steps left, in their order. Raises tarfile.TarError where the blob is not of such a task."""
    names = _names(toml)
    if names is None:
        return [Left(blob)]
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as archive:
        members = {member.name: member for member in archive}

        def read(name: str) -> bytes:
            content = archive.extractfile(members[name]) if name in members else None
            if content is None:
                raise tarfile.ReadError(f"it holds no {name}")
            return content.read()

        left = [{place: read(name) for place, name in each.items()} for each in names]
    return [Left(each.pop(WORKSPACE), each) for each in left]


def _names(toml: TaskToml) -> list[dict[str, str]] | None:
    """The members of a blob by what they hold, for each step; None where the blob is the workspace itself."""
    if not toml.steps and not toml.places:
        return None
    folders = {WORKSPACE: "", **{place: f"@{number}" for number, place in enumerate(toml.places)}}
    return [{place: f"{step.name or 'workspace'}{mark}.tar" for place, mark in folders.items()} for step in toml.each_step()]
