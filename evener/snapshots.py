"""What an attempt leaves is one blob: the archived workspace, or of a task of several steps one such archive for each of them.

Made by the runner (and by `evener tasks check`), taken apart by the verifier; all else hands digests on. Each archive is as
`evener.sandbox.snapshot` made it, so its reader need not trust its maker.
"""

import io
import shutil
import tarfile
from collections.abc import Sequence

from evener.errors import TaskError
from evener.sandbox import WORKSPACE, Sandbox
from evener.sandbox.initial import Added
from evener.sandbox.snapshot import MAX_BYTES, Snapshot
from evener.tasks import SETUP, WORKDIR, TaskToml

SETUP_S = 300.0
"""How long a set-up script may take, which an agent's budget does not limit where its step is not begun."""


class Workspaces:
    """The workspace of one sandbox, step by step: what a step adds is laid over it, and what the step leaves is archived.

    ``additions``: `added_by`, for each step. The steps share the size that a snapshot may have equally.
    """

    def __init__(self, sandbox: Sandbox, toml: TaskToml, additions: Sequence[Added | None]) -> None:
        self._sandbox = sandbox
        self._toml = toml
        self._additions = additions
        self._begun = 0
        self._taken: list[Snapshot] = []
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
        room = MAX_BYTES // len(self._additions)
        self._taken.append(await self._sandbox.snapshot(WORKSPACE, max_bytes=room))

    async def finish(self) -> Snapshot:
        """The blob. A step that is still to end, or to begin, finds and leaves the workspace as it is. Raises as `begin`."""
        while len(self._taken) < len(self._additions):
            if self._begun == len(self._taken):
                await self.begin()
            await self.end()
        left_out = [
            f"{step.name}: {line}" if step.name else line
            for step, taken in zip(self._toml.each_step(), self._taken, strict=True)
            for line in taken.left_out
        ]
        return Snapshot(join(self._toml, [taken.tar for taken in self._taken]), left_out)

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


def join(toml: TaskToml, snapshots: Sequence[bytes]) -> bytes:
    """One blob of the snapshots of all steps, in their order. Its bytes depend on them alone."""
    if not toml.steps:
        (only,) = snapshots
        return only
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for step, snapshot in zip(toml.steps, snapshots, strict=True):
            info = tarfile.TarInfo(f"{step.name}.tar")
            info.size = len(snapshot)
            archive.addfile(info, io.BytesIO(snapshot))
    return buffer.getvalue()


def split(toml: TaskToml, blob: bytes) -> list[bytes]:
    """The snapshots of all steps, in their order. Raises tarfile.TarError where the blob is not of such a task."""
    if not toml.steps:
        return [blob]
    snapshots: list[bytes] = []
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as archive:
        members = {member.name: member for member in archive}
        for step in toml.steps:
            member = members.get(f"{step.name}.tar")
            content = None if member is None else archive.extractfile(member)
            if content is None:
                raise tarfile.ReadError(f"it holds no {step.name}.tar")
            snapshots.append(content.read())
    return snapshots
