"""The `evener` command: every fault is one line on stderr; exit code 2 for bad input, 1 for a failure, 0 else."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from msgspec.structs import asdict

from evener import log, settings
from evener.api import ApiClient, Refused
from evener.blobs import Blobs
from evener.catalogue import CATALOGUE
from evener.cli import dead, embedded, regrade, sql, tasks
from evener.cli import doctor as doctor_
from evener.cli import run as run_
from evener.cli import serve as serve_
from evener.cli import verify as verify_
from evener.cli.connect import connect
from evener.cli.output import cell, err, out, print_json, print_table
from evener.cli.scores import print_scores
from evener.cli.trace import print_trace, token_decoder
from evener.errors import EvenerError, InputError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
runs = typer.Typer(no_args_is_help=True, help="Runs: ls, show, pause, resume, cancel.")
rollouts = typer.Typer(no_args_is_help=True, help="Rollouts: ls, show, verify, regrade.")
harnesses = typer.Typer(no_args_is_help=True, help="Harnesses: ls, install.")
for _group, _name in (
    (runs, "runs"),
    (rollouts, "rollouts"),
    (tasks.app, "tasks"),
    (harnesses, "harnesses"),
    (dead.app, "dead"),
):
    app.add_typer(_group, name=_name)

Json = Annotated[bool, typer.Option("--json", help="Print the JSON document.")]
File = Annotated[Path, typer.Argument(help="A run file (TOML).")]
Id = Annotated[str, typer.Argument(help="An id, a unique suffix of one, a run's name, or `latest`.")]


def _log_to_folder(here: settings.Settings) -> None:
    folder = here.data / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log.configure(level=here.log_level, path=folder / "evener.log")


def _asyncio(main: Coroutine[Any, Any, Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _last(main: Coroutine[Any, Any, int]) -> NoReturn:
    """Run a stack or a service and leave at once with its exit code.

    The trainer's thread may be amid an import of torch, which nothing can stop; all that must be written is written by now.
    """

    async def ending() -> None:
        try:
            code = await main
        except EvenerError as error:
            err.print(f"evener: {error}", markup=False, style="red")
            code = error.exit_code
        except Refused as error:
            err.print(f"evener: {error}", markup=False, style="red")
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    _asyncio(ending())
    raise AssertionError("unreachable")


def _read(ask: Callable[[ApiClient], Coroutine[Any, Any, Any]]) -> Any:
    """Ask the API something."""
    here = settings.load()
    if here.data.exists():
        _log_to_folder(here)

    async def main() -> Any:
        async with connect(here) as api:
            return await ask(api)

    return _asyncio(main())


@app.command()
def run(
    file: File,
    new: Annotated[bool, typer.Option("--new", help="Start another run of that name instead of resuming.")] = False,
    as_json: Json = False,
) -> None:
    """Train (or evaluate) as a run file says; the same name resumes."""
    here = settings.load()
    _log_to_folder(here)
    _last(run_.run(here, file, new=new, evaluate=False, as_json=as_json))


@app.command("eval")
def evaluate(file: File, new: Annotated[bool, typer.Option("--new")] = False, as_json: Json = False) -> None:
    """Evaluate a run file's policy on its [eval] tasks without training."""
    here = settings.load()
    _log_to_folder(here)
    _last(run_.run(here, file, new=new, evaluate=True, as_json=as_json))


@app.command()
def up(
    policy: Annotated[Path, typer.Option(help="The policy folder that the engine serves.")],
    name: Annotated[str, typer.Option(help="The policy's name: the name of the run that trains it.")] = "policy",
) -> None:
    """Run the embedded stack until Ctrl-C."""
    here = settings.load()
    _log_to_folder(here)
    _last(run_.up(here, policy=policy, name=name))


@app.command()
def serve(
    service: Annotated[Literal["proxy", "orchestrator", "runner", "verifier", "learner", "engine"], typer.Argument()],
    policy: Annotated[Path | None, typer.Option(help="engine: the policy folder.")] = None,
    name: Annotated[
        str | None, typer.Option(help="engine: the policy's name; others: the process's name in ledger and log (host-pid).")
    ] = None,
) -> None:
    """Run one service in this process until SIGTERM; see docs/architecture.md for its settings."""
    here = settings.load()
    log.configure(level=here.log_level)
    if service == "engine":
        serve_.serve_engine(here, policy=policy, name=name or "policy")
    elif policy is not None:
        raise InputError("settings_invalid", f"--policy: is the engine's; `evener serve {service}` reads EVENER_POLICY")
    else:
        _last(serve_.serve(here, service, name=name))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is missing here, and how to get it."""
    checks = doctor_.examine(settings.load())
    rows = [{"check": c.name, "state": c.state, "detail": c.detail} for c in checks]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, ["check", "state", "detail"])
    raise typer.Exit(1 if any(c.state == "missing" for c in checks) else 0)


@app.command("sql")
def sql_(query: Annotated[str, typer.Argument(help="One SELECT.")], as_json: Json = False) -> None:
    """Query the ledger, read-only."""
    rows = sql.query(settings.load(), query)
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, list(rows[0]))
    if not as_json:
        err.print(f"{len(rows)} rows", style="dim")


@runs.command("ls")
def runs_ls(as_json: Json = False) -> None:
    """All runs, newest last."""
    document = _read(lambda api: api.get("/v1/runs"))
    print_json(document) if as_json else print_table(document, ["run_id", "name", "kind", "state", "step", "steps", "reason"])


@runs.command("show")
def runs_show(run: Id, as_json: Json = False) -> None:
    """One run: progress, outcomes, pass@1."""
    state = _read(lambda api: api.get(f"/v1/runs/{run}"))
    if as_json:
        print_json(state)
        return
    for name in (
        "run_id",
        "name",
        "kind",
        "state",
        "reason",
        "step",
        "steps",
        "version",
        "sampled_tokens",
        "rollouts",
        "groups",
    ):
        out.print(f"{name:<15} {cell(state[name])}")
    out.print(run_.pass1_table(state))


def _control(run: str, action: str) -> None:
    state = _read(lambda api: api.post(f"/v1/runs/{run}/{action}"))
    out.print(f"{state['name']}: {state['state']}")


@runs.command("pause")
def runs_pause(run: Id) -> None:
    """Plan and dispatch nothing more until it is resumed."""
    _control(run, "pause")


@runs.command("resume")
def runs_resume(run: Id) -> None:
    """Go on with a paused run."""
    _control(run, "resume")


@runs.command("cancel")
def runs_cancel(run: Id) -> None:
    """End a run; its agents are stopped."""
    _control(run, "cancel")


@rollouts.command("ls")
def rollouts_ls(
    run: Annotated[str, typer.Option(help="Only of this run.")] = "latest",
    outcome: Annotated[str, typer.Option(help="Only with this outcome.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many, newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """Rollouts, newest first."""
    query = {"run": run, "limit": str(limit)} | ({"outcome": outcome} if outcome else {})
    document = _read(lambda api: api.get("/v1/rollouts", **query))
    columns = [
        "rollout_id",
        "task_id",
        "harness",
        "purpose",
        "outcome",
        "score",
        "tier",
        "tampered",
        "reward",
        "calls",
        "version_min",
        "cause",
    ]
    print_json(document) if as_json else print_table(document, columns)


@rollouts.command("show")
def rollouts_show(
    rollout: Id,
    trace: Annotated[bool, typer.Option("--trace", help="The conversation, token by token.")] = False,
    logs: Annotated[bool, typer.Option("--logs", help="What the agent printed.")] = False,
    as_json: Json = False,
) -> None:
    """One rollout: outcome, scores, evidence."""

    async def ask(api: ApiClient) -> dict[str, Any]:
        document: dict[str, Any] = await api.get(f"/v1/rollouts/{rollout}")
        own = document["rollout_id"]
        if trace:
            document["trace"] = await api.get(f"/v1/rollouts/{own}/trace")
            document["sequences"] = (await api.get(f"/v1/rollouts/{own}/sequences"))["sequences"]
            document["weights"] = (await api.get(f"/v1/runs/{document['run_id']}"))["weights"]
        if logs:
            document["logs"] = (await api.request("GET", f"/v1/rollouts/{own}/logs")).decode(errors="replace")
        return document

    document = _read(ask)
    if as_json:
        print_json(document)
        return
    for name, value in document.items():
        if name not in ("trace", "sequences", "logs", "weights", "scores", "regrades"):
            out.print(f"{name:<15} {cell(value)}", soft_wrap=True)
    print_scores([*document["scores"], *document["regrades"]])
    if logs:
        out.rule("logs", align="left")
        out.print(document["logs"], markup=False)
    if trace:
        decode = token_decoder(Blobs(settings.load().blobs), document["weights"])
        print_trace(document["trace"], document["sequences"], decode)


@rollouts.command("verify")
def rollouts_verify(
    rollout: Id,
    engine: Annotated[
        str | None, typer.Option(help="The URL of an engine that runs; without it the weights are served here, on the CPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a rollout's trained tokens again and say the largest difference; 1 where it is too large."""
    here = settings.load()
    if here.data.exists():
        _log_to_folder(here)
    document = _asyncio(verify_.verify(here, rollout, engine=engine))
    print_json(document) if as_json else verify_.show(document)
    raise typer.Exit(0 if document["holds"] else 1)


@rollouts.command("regrade")
def rollouts_regrade(
    which: Annotated[str, typer.Argument(help="A rollout, a group or a run: an id or a unique suffix; `latest`: the rollout.")],
    as_json: Json = False,
) -> None:
    """Grade stored snapshots again with the current verifier; the scores that counted stay as they are."""
    here = settings.load()
    if here.data.exists():
        _log_to_folder(here)
    document = _asyncio(regrade.regrade(here, which, err))
    print_json(document) if as_json else regrade.show(document)
    raise typer.Exit(1 if regrade.failed(document) else 0)


@harnesses.command("ls")
def harnesses_ls(as_json: Json = False) -> None:
    """The harnesses that a run file may name: those of EVENER_URL, else of this version, with what is installed here."""
    here = settings.load()
    if here.url:
        rows: list[dict[str, Any]] = _read(lambda api: api.get("/v1/harnesses"))
    else:
        rows = [asdict(listing) | {"installed": embedded.harness_installed(here, name)} for name, listing in CATALOGUE.items()]
    if as_json:
        print_json(rows)
        return
    columns = ["name", "version", "dialect", "profiles"] + ([] if here.url else ["installed"])
    print_table([row | {"profiles": ", ".join(row["profiles"])} for row in rows], columns)


@harnesses.command("install")
def harnesses_install(name: Annotated[str, typer.Argument()]) -> None:
    """Install a harness into the cache folder."""
    if name not in embedded.harnesses():
        raise InputError("harness_unknown", f"{name!r}; known: {', '.join(embedded.harnesses())}")
    _asyncio(embedded.install_harness(settings.load(), name, err.print))


def main() -> None:
    """Run the command; faults become one line and an exit code."""
    try:
        app()
    except EvenerError as error:
        err.print(f"evener: {error}", markup=False, style="red")
        sys.exit(error.exit_code)
    except Refused as error:
        err.print(f"evener: {error}", markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
