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
from evener.cli.progress import clock, outcomes, pass1_table, watch
from evener.cli.submit import Submission, prepare, submit
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
        async with ApiClient(settings.url, settings.api_token.get_secret_value()) as api:
            return await _follow(api, submission, stop, new=new, as_json=as_json, owned=False)
    for harness in document.harness:
        await asyncio.to_thread(embedded.install_harness, settings, harness.name, err.print)
    _warn_of_sandbox(settings, document)
    async with embedded.embedded(
        settings, policy=submission.policy, name=document.name, train=document.train is not None, stop=stop
    ) as stack:
        async with ApiClient(stack.settings.api, stack.settings.api_token.get_secret_value()) as api:
            code = await _follow(api, submission, stop, new=new, as_json=as_json, owned=True)
        fault = stack.fault()
    if fault is not None:
        raise fault
    return code


def _warn_of_sandbox(settings: Settings, document: runfile.RunFile) -> None:
    problem = embedded.sandbox_problem()
    if problem is not None and "auto" in (settings.sandbox, document.rollouts.sandbox):
        err.print(f"[bold red]Agents run without isolation[/] as your own user: {problem}")


async def _follow(api: ApiClient, submission: Submission, stop: asyncio.Event, *, new: bool, as_json: bool, owned: bool) -> int:
    answer = await submit(api, submission, new=new)
    if answer["resumed"]:
        err.print(f"resuming run {submission.run.name} ({answer['run_id']}); --new starts another")
    else:
        err.print(f"run {submission.run.name} ({answer['run_id']})")
    state = await watch(api, answer["run_id"], err, stop)
    if as_json:
        print_json(state)
    else:
        await _summary(api, state)
    if state["state"] == "done":
        return 0
    if stop.is_set() and owned:
        err.print("stopped; the same command resumes it")
    return 1


async def _summary(api: ApiClient, state: dict[str, Any]) -> None:
    seconds = (state["ended"] or 0) - (state["started"] or 0)
    took = f" in {clock(seconds)}" if seconds > 0 else ""
    out.print(f"{state['name']}: {state['state']}{took}, {state['rollouts']['ended']} rollouts: {outcomes(state)}")
    if state["note"]:
        out.print(state["note"])
    out.print(pass1_table(state))
    failed = await _one_failed(api, state)
    if failed is not None:
        out.print(f"one that failed: evener rollouts show {failed} --trace")


async def _one_failed(api: ApiClient, state: dict[str, Any]) -> str | None:
    for outcome in ("infra_error", "task_error", "agent_error", "budget"):
        if state["outcomes"].get(outcome):
            rows = (await api.get("/v1/rollouts", run=state["run_id"], outcome=outcome, limit="1"))["rollouts"]
            if rows:
                return str(rows[0]["rollout_id"])
    return None


async def up(settings: Settings, *, policy: Path, name: str) -> int:
    """Run the embedded stack until it is told to stop."""
    from evener.cli.submit import check_policy

    check_policy(policy)
    stop = asyncio.Event()
    embedded.on_signals(stop)
    async with embedded.embedded(settings, policy=policy, name=name, train=True, stop=stop) as stack:
        err.print(f"API {stack.settings.api} (docs at /docs), proxy {stack.settings.proxy}, engine {stack.settings.engines[0]}")
        err.print("other commands in this folder find it by themselves; Ctrl-C stops it")
        await stop.wait()
        fault = stack.fault()
    if fault is not None:
        raise fault
    return 0
