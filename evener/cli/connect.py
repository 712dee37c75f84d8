"""Which API a command talks to: the one of EVENER_URL, else the stack that runs in this folder, else the ledger at rest."""

import contextlib
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from evener.api import ApiClient
from evener.cli.embedded import ledger_only
from evener.errors import InputError
from evener.settings import Settings


@contextlib.asynccontextmanager
async def connect(settings: Settings) -> AsyncGenerator[ApiClient]:
    """A client for a command that reads. Raises InputError where there is nothing to read yet."""
    running = running_stack(settings.data)
    if settings.url:
        async with ApiClient(settings.url, settings.api_token.get_secret_value(), patience_s=5) as api:
            yield api
    elif running is not None:
        async with ApiClient(running[0], running[1], patience_s=5) as api:
            yield api
    elif not (settings.data / "ledger.db").exists():
        raise InputError("not_found", f"{settings.data} holds no ledger yet; start with `evener run FILE`, or set EVENER_URL")
    else:
        async with ledger_only(settings) as own, ApiClient(own.api, own.api_token.get_secret_value()) as api:
            yield api


def running_stack(folder: Path) -> tuple[str, str] | None:
    """URL and token of the embedded stack that runs in ``folder`` now."""
    try:
        document = json.loads((folder / "stack.json").read_text())
        os.kill(document["pid"], 0)
    except (FileNotFoundError, ProcessLookupError, json.JSONDecodeError):
        return None
    return document["url"], document["api_token"]
