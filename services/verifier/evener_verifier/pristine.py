"""What an agent that does nothing leaves where set-up scripts have a part in it: they run in a sandbox like the agent's.

A script that fails in what nobody touched is the task author's fault. Called by the verifier, once a scoring.
"""

import asyncio
from pathlib import Path

from evener.archive import tar_of_folder
from evener.errors import TaskError
from evener.sandbox import WORKSPACE, Folder, Kind, SandboxSpec, create
from evener.sandbox.initial import added_by, lay_out, limits_of, writable_of
from evener.sandbox.threads import in_thread
from evener.snapshots import Workspaces, split
from evener.tasks import read_toml
from evener_verifier.grader import TTL_S


async def set_up(task: Path, place: Path, kind: Kind) -> list[bytes] | None:
    """The untouched workspace of each step, as tar files; None where no step has a set-up script.

    ``task`` is an unpacked agent side; ``place`` a path for the sandbox's folder, which is gone afterwards. Raises TaskError
    ``task_setup``, also for a task that no agent of such a sandbox could do, and InfraError.
    """
    toml = read_toml(task / "task.toml")
    writable = writable_of(toml, kind)
    additions = [added_by(step, task) for step in toml.each_step()]
    if not any(added is not None and added.sets_up for added in additions):
        return None
    folder = Folder.make(place.parent, place.name, ttl_s=TTL_S)
    try:
        await in_thread(lay_out, task / "environment", folder.path / "initial")
        sandbox = await create(kind, SandboxSpec(folder, writable=writable, limits=limits_of(toml)))
        try:
            await sandbox.upload(await in_thread(tar_of_folder, folder.path / "initial"), WORKSPACE)
            workspaces = Workspaces(sandbox, toml, additions)
            taken = await workspaces.finish()
        finally:
            await sandbox.destroy()
    finally:
        await asyncio.to_thread(folder.remove)
    if workspaces.failures:
        raise TaskError("task_setup", workspaces.failures[0])
    return [left.workspace for left in split(toml, taken.tar)]
