"""`evener harnesses ls` says the same as the API, for people and for programs."""

import asyncio
import json

from typer.testing import CliRunner

from evener.cli.main import app
from tests.unit.orchestrator.world import TOKEN


async def call(*arguments):
    """Run the command in a thread: it has an event loop of its own."""
    result = await asyncio.to_thread(CliRunner().invoke, app, ["harnesses", "ls", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_the_command_lists_what_the_api_lists(world, tmp_path, monkeypatch):
    listed = await world.api.get("/v1/harnesses")
    monkeypatch.setenv("EVENER_CACHE", str(tmp_path))
    monkeypatch.setenv("EVENER_DATA", str(tmp_path / "none"))
    monkeypatch.delenv("EVENER_URL", raising=False)
    assert json.loads(await call("--json")) == [listing | {"installed": False} for listing in listed]
    monkeypatch.setenv("EVENER_URL", world.settings.api)
    monkeypatch.setenv("EVENER_API_TOKEN", TOKEN)
    assert json.loads(await call("--json")) == listed
    header, line = (await call()).splitlines()
    assert header.split() == ["name", "version", "dialect", "profiles"]
    assert line.split() == ["pi", "1.6.0", "chat", "default,", "minimal"]
