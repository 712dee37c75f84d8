"""What an attempt finds when its agent starts: the task's workspace, the installed agent, the proxy, and its key in a file.

From a lease's task bundle to a sandbox that wants only the agent's command. Nothing of the grader's side is ever fetched.
Called by the attempt.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path

from evener.api import RolloutLease
from evener.archive import tar_of_files, tar_of_folder
from evener.errors import InputError, TaskError
from evener.log import get
from evener.sandbox import HOME, WORKSPACE, Folder, Kind, Limits, Mount, Sandbox, SandboxSpec, create
from evener.sandbox.initial import Added, added_by, lay_out, limits_of, writable_of
from evener.settings import Settings
from evener.tasks import TaskToml, read_instructions, read_toml, unpack
from evener_runner import compile_cache, install
from evener_runner.harnesses import NODE, Access, Harness

MODEL = "policy"
"""The model's name for every agent: the session decides which policy answers."""
WINDOW = 32768
"""Context tokens that an agent is told of where the budget names none; the proxy knows the engine's own."""
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"

_log = get("runner")


@dataclass(frozen=True, slots=True)
class JobStep:
    """What the agent is started for at once. ``wall_s``: the budget's time, or the step's own limit where that is shorter."""

    instruction: str
    wall_s: float
    added: Added | None
    """What is laid over the workspace before."""


@dataclass(frozen=True, slots=True)
class Job:
    """A task as a runner sees it."""

    toml: TaskToml
    steps: list[JobStep]
    workspace: bytes
    limits: Limits


@dataclass(frozen=True, slots=True)
class Start:
    """The agent's command and environment; it reads the instruction from standard input."""

    argv: list[str]
    env: dict[str, str]


def read_job(bundle: bytes, lease: RolloutLease, folder: Folder) -> Job:
    """Unpack the agent's side of a task. Blocks. Raises TaskError ``task_setup``."""
    task = folder.path / "task"
    try:
        unpack(bundle, task)
        toml = read_toml(task / "task.toml")
        instructions = read_instructions(task, toml)
    except (OSError, tarfile.TarError, InputError) as error:
        raise TaskError("task_setup", f"{lease.task_id}: {error}") from error
    workspace = folder.path / "initial"
    lay_out(task / "environment", workspace)
    steps: list[JobStep] = []
    for step, instruction in zip(toml.each_step(), instructions, strict=True):
        wall_s = min(lease.budget.wall_s, step.toml.agent.timeout_sec or lease.budget.wall_s)
        steps.append(JobStep(instruction.strip() + "\n", wall_s, added_by(step, task)))
    return Job(toml, steps, tar_of_folder(workspace), limits_of(toml))


async def make_sandbox(harness: Harness, job: Job, kind: Kind, folder: Folder, settings: Settings) -> Sandbox:
    """A sandbox with the agent and the workspace in it. Raises InfraError, TaskError ``task_setup``."""
    installation = await install.ensure(harness, settings.cache, _say)
    mounts = [Mount(installation.node, NODE), Mount(installation.prefix, harness.prefix)]
    cache = await compile_cache.ensure(kind, harness, installation, settings.cache, sandboxes(settings))
    mounts.append(Mount(cache, compile_cache.COMPILE_CACHE))
    env = {"NODE_COMPILE_CACHE": compile_cache.COMPILE_CACHE if kind == "bubblewrap" else str(cache)}
    spec = SandboxSpec(
        folder,
        mounts=tuple(mounts),
        writable=writable_of(job.toml, kind),
        env={**env, **harness.env},
        limits=job.limits,
        proxy_url=settings.proxy,
    )
    sandbox = await create(kind, spec)
    try:
        await sandbox.upload(job.workspace, WORKSPACE)
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox


async def hand_over(sandbox: Sandbox, harness: Harness, lease: RolloutLease, key: str) -> Start:
    """Give the agent its key; returns how it is started."""
    assert sandbox.proxy_url is not None, "an agent's sandbox reaches the proxy"
    access = Access(sandbox.proxy_url, key, MODEL, lease.budget.context_tokens or WINDOW)
    await sandbox.upload(tar_of_files(harness.files(access)), HOME)
    command, *arguments = harness.argv(lease.harness.profile, access)
    return Start([sandbox.locate(command), *arguments], {"PATH": f"{sandbox.locate(NODE)}/bin:{_SYSTEM_PATH}"})


def _say(step: str) -> None:
    _log.info(step)


def sandboxes(settings: Settings) -> Path:
    """The folder of this host's sandboxes."""
    return settings.data / "sandboxes"
