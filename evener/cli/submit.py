"""A run is submitted whole or not at all: everything is read and checked before anything is started or sent."""

import asyncio
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from evener.api import ApiClient
from evener.errors import InputError
from evener.runfile import RunFile
from evener.tasks import Task, agent_bundle, grader_bundle, read_tasks

POLICY_FILES = ("config.json", "model.safetensors", "tokenizer_config.json")


@dataclass(frozen=True)
class Submission:
    """A run file with the tasks it names, read and checked."""

    run: RunFile
    tasks: list[Task]
    eval_tasks: list[Task]
    policy: Path


def prepare(run: RunFile, harnesses: set[str]) -> Submission:
    """Read all that a run names. Raises InputError for the first thing that is wrong."""
    for harness in run.harness:
        if harness.name not in harnesses:
            raise InputError("harness_unknown", f"{harness.name!r}; known: {', '.join(sorted(harnesses))}")
    policy = check_policy(Path(run.policy))
    tasks = read_tasks(run.tasks)
    return Submission(run, tasks, read_tasks(run.eval.tasks) if run.eval else [], policy)


def check_policy(folder: Path) -> Path:
    """A policy folder that an engine can load. Raises InputError that names what is missing."""
    if not folder.is_dir():
        raise InputError("policy_invalid", f"{folder} is not a folder")
    for name in POLICY_FILES:
        if not (folder / name).is_file():
            raise InputError("policy_invalid", f"{folder} has no {name}")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError("policy_invalid", f"{folder} has no tokenizer (tokenizer.json)")
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    if not ((folder / "chat_template.jinja").is_file() or "chat_template" in config):
        raise InputError("policy_invalid", f"{folder} has no chat template (chat_template.jinja)")
    return folder


async def submit(api: ApiClient, submission: Submission, *, new: bool) -> dict[str, Any]:
    """Upload what the API has not yet, then create or resume the run: ``{"run_id": ..., "resumed": ...}``."""
    body = {
        "run": submission.run.model_dump(mode="json"),
        "tasks": [await _upload(api, task) for task in submission.tasks],
        "eval_tasks": [await _upload(api, task) for task in submission.eval_tasks],
        "weights": await _upload_policy(api, submission.policy),
        "trusted": True,
        "new": new,
    }
    return await api.post("/v1/runs", body)


async def _upload(api: ApiClient, task: Task) -> str:
    agent, grader = await asyncio.to_thread(agent_bundle, task), await asyncio.to_thread(grader_bundle, task)
    return await api.upload_task(task.id, task.family, agent, grader)


async def _upload_policy(api: ApiClient, folder: Path) -> str:
    return await api.upload_policy(await asyncio.to_thread(_pack_policy, folder))


def _pack_policy(folder: Path) -> bytes:
    """A tar file of the policy's files, the same bytes for the same content."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            if not path.is_file() or path.name.startswith("."):
                continue
            info = tarfile.TarInfo(path.name)
            info.size = path.stat().st_size
            info.mode = 0o644
            with path.open("rb") as content:
                archive.addfile(info, content)
    return buffer.getvalue()
