"""`evener run` and `evener eval`: submit a run, show it, and end with what came of it.

Where EVENER_URL is set the run goes on when this command is stopped; on the embedded stack it stops with the command, and
the same command resumes it.
"""

import asyncio
from pathlib import Path
from typing import Any

from evener import runfile
from evener.api import ApiClient
from evener.cli import embedded
from evener.cli.output import err, out, print_json
from evener.cli.progress import ENDED, clock, outcomes, pass1_table, watch
from evener.cli.submit import Submission, check_policy, prepare, submit
from evener.sandbox.probe import bubblewrap_missing
from evener.settings import Settings


async def run(settings: Settings, file: Path, *, new: bool, evaluate: bool, as_json: bool) -> int:
    """Run a run file to its end; the exit code."""
    document = runfile.read(file)
    if evaluate:
        tasks = document.eval.tasks if document.eval else document.tasks
        document = document.model_copy(update={"name": f"{document.name}-eval", "train": None, "eval": None, "tasks": tasks})
    submission = prepare(document, set(embedded.harnesses()))
    stop = asyncio.Event()
    embedded.on_signals(stop)
    if settings.url:
        return await _elsewhere(settings.url, settings, submission, stop, new=new, as_json=as_json)
    for harness in document.harness:
        await embedded.install_harness(settings, harness.name, err.print)
    await _warn_of_sandbox(settings, document)
    async with embedded.embedded(settings, policy=submission.policy, name=document.name, stop=stop) as stack:
        async with ApiClient(stack.settings.api, stack.settings.api_token.get_secret_value()) as api:
            await _pause_others(api, document.name)
            answer = await submit(api, submission, new=new)
            stack.learn(answer["policy"])
            state = await _follow(api, submission, answer, stop)
            await _end(api, state, as_json=as_json)
        stack.raise_fault()
    if state["state"] != "done" and state["state"] != "failed":
        err.print("stopped; the same command resumes it")
    return 0 if state["state"] == "done" else 1


async def _elsewhere(
    url: str, settings: Settings, submission: Submission, stop: asyncio.Event, *, new: bool, as_json: bool
) -> int:
    """Submit a run to the stack at ``url`` and show it; nothing is started here."""
    async with ApiClient(url, settings.api_token.get_secret_value()) as api:
        answer = await submit(api, submission, new=new)
        state = await _follow(api, submission, answer, stop)
        await _end(api, state, as_json=as_json)
    if state["state"] not in ENDED:
        err.print(f"the run goes on at {url}; the same command shows it again, `evener runs cancel {state['name']}` ends it")
    return 0 if state["state"] == "done" else 1


async def _warn_of_sandbox(settings: Settings, document: runfile.RunFile) -> None:
    problem = await bubblewrap_missing()
    if problem is not None and "auto" in (settings.sandbox, document.rollouts.sandbox):
        err.print(f"[bold red]Agents run without isolation[/] as your own user: {problem}")


async def _follow(api: ApiClient, submission: Submission, answer: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
    name = submission.run.name
    if answer["state"] == "paused":
        await api.post(f"/v1/runs/{answer['run_id']}/resume")
    if answer["resumed"] and answer["state"] == "done":
        err.print(f"run {name} ({answer['run_id']}) is done; --new starts another")
    elif answer["resumed"]:
        err.print(f"resuming run {name} ({answer['run_id']}); --new starts another")
    else:
        err.print(f"run {name} ({answer['run_id']})")
    return await watch(api, answer["run_id"], err, stop)


async def _pause_others(api: ApiClient, name: str) -> None:
    """The embedded engine serves one policy: unfinished runs of other names wait until they are run again."""
    for other in await api.get("/v1/runs"):
        if other["state"] == "running" and other["name"] != name:
            await api.post(f"/v1/runs/{other['run_id']}/pause")
            err.print(f"pausing run {other['name']}; its own run file resumes it")


async def _end(api: ApiClient, state: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(state)
    else:
        await _summary(api, state)


async def _summary(api: ApiClient, state: dict[str, Any]) -> None:
    seconds = (state["ended"] or 0) - (state["started"] or 0)
    took = f" in {clock(seconds)}" if seconds > 0 else ""
    out.print(f"{state['name']}: {state['state']}{took}, {state['rollouts']['done']} rollouts: {outcomes(state)}")
    if state["reason"]:
        out.print(state["reason"])
    if state["prompt_reason"]:
        out.print(f"its prompts were rendered, although the run file asks for token_in: {state['prompt_reason']}")
    out.print(pass1_table(state))
    failed = await _one_failed(api, state)
    if failed is not None:
        out.print(f"one that failed: evener rollouts show {failed} --trace")


async def _one_failed(api: ApiClient, state: dict[str, Any]) -> str | None:
    for outcome in ("infra_error", "task_error", "agent_error", "budget"):
        if state["rollouts"]["outcomes"].get(outcome):
            rows = await api.get("/v1/rollouts", run=state["run_id"], outcome=outcome, limit="1")
            if rows:
                return str(rows[0]["rollout_id"])
    return None


async def up(settings: Settings, *, policy: Path, name: str) -> int:
    """Run the embedded stack until it is told to stop."""
    check_policy(policy)
    stop = asyncio.Event()
    embedded.on_signals(stop)
    async with embedded.embedded(settings, policy=policy, name=name, stop=stop) as stack:
        stack.learn(name)
        err.print(f"API {stack.settings.api} (docs at /docs), proxy {stack.settings.proxy}, engine {stack.settings.engines[0]}")
        err.print("other commands in this folder find it by themselves; Ctrl-C stops it")
        await stop.wait()
        stack.raise_fault()
    return 0
