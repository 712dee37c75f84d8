"""`evener tasks`: look at task directories, check them, and begin a new one; no stack is needed for any of it."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from evener import log, settings
from evener.cli.output import cell, err, out, print_json, print_table
from evener.cli.task_check import check_all, report
from evener.cli.task_new import scaffold
from evener.tasks import read_tasks, task_folders

app = typer.Typer(no_args_is_help=True, help="Tasks: ls, show, check, new.")

Json = Annotated[bool, typer.Option("--json", help="Print the JSON document.")]


@app.command("ls")
def ls(folder: Annotated[Path, typer.Argument(help="A folder of task directories.")], as_json: Json = False) -> None:
    """Read all tasks below a folder, and say which one is malformed."""
    rows = [{"id": task.id, "family": task.family, "instruction": task.instruction.strip()} for task in read_tasks(folder)]
    print_json(rows) if as_json else print_table(rows, ["id", "family", "instruction"])


@app.command("show")
def show(folder: Annotated[Path, typer.Argument(help="A task directory.")], as_json: Json = False) -> None:
    """One task: instruction, limits, files."""
    task = read_tasks(folder)[0]
    files = [str(p.relative_to(task.folder)) for p in sorted(task.folder.rglob("*")) if p.is_file()]
    document = {
        "id": task.id,
        "family": task.family,
        "instruction": task.instruction,
        "files": files,
        "task.toml": task.toml.model_dump(mode="json"),
    }
    if as_json:
        print_json(document)
        return
    for name, value in document.items():
        out.print(f"{name:<15} {cell(value)}", soft_wrap=True)


@app.command("check")
def check(
    folders: Annotated[list[Path], typer.Argument(help="Task directories, or folders of them.")],
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Tasks at once; default: the cores.")] = os.cpu_count() or 1,
    as_json: Json = False,
) -> None:
    """Score each task's solution and its untouched workspace as rollouts are scored; the first must get 1, the second less."""
    here = settings.load()
    log.configure(level="ERROR")  # the lines of this command say what went wrong with which task
    found = [task for folder in folders for task in task_folders(folder)]
    checks = asyncio.run(check_all(found, jobs=jobs, settings=here, console=err))
    if as_json:
        print_json(report(checks))
    else:
        checks.print(out)
    raise typer.Exit(0 if checks.passed == len(checks.verdicts) else 1)


@app.command("new")
def new(folder: Annotated[Path, typer.Argument(help="The new task's directory; its name is the task's id.")]) -> None:
    """Begin a task: a small whole one, graded out of process, whose check passes."""
    for path in scaffold(folder):
        out.print(str(path), soft_wrap=True)
    err.print(f"check it: evener tasks check {folder}", markup=False)
