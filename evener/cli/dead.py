"""`evener dead`: the messages that failed too often, for people; what is printed holds no secret, what is retried goes once.

Dead letters are in the broker, not in the ledger, so these commands speak to the bus of EVENER_AMQP_URL and need no API. A
letter leaves ``evener.dead`` only after its own queue has confirmed it.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar, cast

import msgspec
import typer

from evener import bus as bus_
from evener import log, settings
from evener.bus import Bus, DeadLetter
from evener.cli.output import out, print_json, print_table
from evener.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Messages that failed too often: ls, show, retry.")

PATIENCE_S = 5.0
"""A person waits: shorter than a service does."""

MASK = "***"
_SECRET_TEXT = re.compile(r'"([^"\\]*)"\s*:\s*"((?:[^"\\]|\\.)*)')
"""A name and its string in a body that is no JSON, which may end inside the string."""

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print the JSON document.")]
Queue = Annotated[str | None, typer.Option(help="Only those of this queue.")]
DeadId = Annotated[str, typer.Argument(help="An id, a unique suffix of one, or `latest`.")]


@app.command("ls")
def ls(queue: Queue = None, as_json: Json = False) -> None:
    """All dead letters, oldest first."""
    letters = _ask(lambda bus: bus.dead_letters(None))
    rows = [_row(letter) for letter in letters if queue in (None, letter.queue)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["age"] = _age(row["died"])
    print_table(rows, ["id", "queue", "kind", "age", "deaths", "reason"])


@app.command("show")
def show(dead_id: DeadId, as_json: Json = False) -> None:
    """One dead letter: its message and its headers."""
    letter = _find(_ask(lambda bus: bus.dead_letters(None)), dead_id)
    document = _row(letter) | _without_secrets({"message": _message(letter.body), "headers": letter.headers})
    if as_json:
        print_json(document)
        return
    for name in ("id", "queue", "kind", "deaths", "reason"):
        out.print(f"{name:<10} {document[name]}", markup=False, soft_wrap=True)
    out.print(f"{'age':<10} {_age(document['died'])}")
    for name in ("message", "headers"):
        out.rule(name, align="left")
        print_json(document[name])


@app.command("retry")
def retry(
    dead_id: Annotated[str | None, typer.Argument(help="An id, a unique suffix of one, or `latest`.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    queue: Queue = None,
    as_json: Json = False,
) -> None:
    """Put one dead letter, or all, back into its queue."""
    if (dead_id is None) is not every:
        raise typer.BadParameter("give either an ID or --all")
    if dead_id is not None and queue is not None:
        raise typer.BadParameter("--queue goes with --all")
    document = _ask(lambda bus: _retry_all(bus, queue) if dead_id is None else _retry_one(bus, dead_id))
    if as_json:
        print_json(document)
    elif dead_id is not None:
        out.print(f"{document['id']} is back in {document['queue']}", markup=False, soft_wrap=True)
    else:
        out.print(f"{document['retried']} dead letters are back in {queue or 'their queues'}", markup=False, soft_wrap=True)


async def _retry_one(bus: Bus, dead_id: str) -> dict[str, Any]:
    letter = _find(await bus.dead_letters(None), dead_id)
    if not await bus.retry(letter.id):
        raise InputError("not_found", f"dead letter {letter.id}: somebody else took it meanwhile")
    return {"retried": 1, "id": letter.id, "queue": letter.queue}


async def _retry_all(bus: Bus, queue: str | None) -> dict[str, Any]:
    return {"retried": await bus.retry(queue=queue), "queue": queue}


def _ask(question: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
    """Ask the broker something. Raises InputError where there is none outside the embedded stack."""

    async def main() -> T:
        async with _connected(settings.load()) as bus:
            return await question(bus)

    return asyncio.run(main())


@asynccontextmanager
async def _connected(here: settings.Settings) -> AsyncGenerator[Bus]:
    log.configure(level="ERROR")  # a lost connection is told once, by the error that ends the command
    if here.amqp_url is None:
        raise InputError("bus_embedded", "EVENER_AMQP_URL is not set")
    bus = bus_.connect(here.amqp_url, patience_s=PATIENCE_S)
    try:
        yield bus
    finally:
        await bus.close()


def _find(letters: list[DeadLetter], text: str) -> DeadLetter:
    found = letters[-1:] if text == "latest" else [letter for letter in letters if letter.id.endswith(text)]
    if len(found) != 1:
        problem = f"{len(found)} have an id that ends so" if found else "see `evener dead ls`"
        raise InputError("not_found", f"dead letter {text!r}: {problem}")
    return found[0]


def _row(letter: DeadLetter) -> dict[str, Any]:
    message = _message(letter.body)
    return {
        "id": letter.id,
        "queue": letter.queue,
        "kind": str(cast("dict[str, Any]", message).get("type", "unknown")) if isinstance(message, dict) else "unreadable",
        "died": None if letter.died is None else datetime.fromtimestamp(letter.died, UTC).isoformat(timespec="seconds"),
        "deaths": letter.deaths,
        "reason": _without_secrets({"reason": letter.reason, "message": message})["reason"],
    }


def _age(died: str | None) -> str:
    if died is None:
        return "-"
    seconds = max(0, int(time.time() - datetime.fromisoformat(died).timestamp()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _message(body: bytes) -> Any:
    """The body's JSON, whether or not it is a message that we know; else its text."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="backslashreplace")


def _without_secrets(document: dict[str, Any]) -> dict[str, Any]:
    """A copy in which what is named like a secret is `MASK` wherever it stands: an error may repeat it in its reason."""
    return _replaced(document, {secret for name, secret in _strings(document) if secret and log.is_secret(name)})


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every string with its name, those inside a text that looks like JSON among them."""
    if isinstance(value, str):
        yield name, value
        yield from _SECRET_TEXT.findall(value)
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from _strings(item, key)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _strings(item, name)


def _replaced(value: Any, secrets: set[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {name: _replaced(item, secrets) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_replaced(item, secrets) for item in cast("list[Any]", value)]
    return value
