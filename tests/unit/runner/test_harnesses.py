import asyncio
import json

import pytest

from evener.api import HarnessRef
from evener.catalogue import CATALOGUE, Listing
from evener.errors import InfraError
from evener_runner.harnesses import HARNESSES, Access, find
from evener_runner.install import make_once

ACCESS = Access("http://127.0.0.1:8701", "sk-evener-secret", "policy", 32768)


@pytest.mark.parametrize("harness", HARNESSES.values(), ids=lambda harness: harness.name)
def test_entries_keep_the_key_out_of_arguments_and_environment(harness):
    assert "default" in harness.profiles
    assert any(b"sk-evener-secret" in content for content in harness.files(ACCESS).values())
    for profile in harness.profiles:
        assert not any("secret" in word for word in harness.argv(profile, ACCESS))
        assert harness.argv(profile, ACCESS)[0].startswith(harness.prefix + "/")
    assert not any("secret" in value for value in harness.env.values())


def test_the_runner_runs_what_the_catalogue_lists():
    assert list(HARNESSES) == list(CATALOGUE)
    for name, listing in CATALOGUE.items():
        harness = HARNESSES[name]
        assert listing == Listing(name=name, dialect=harness.dialect, version=harness.version, profiles=harness.profiles)


def test_pi_is_pointed_at_the_proxy():
    files = HARNESSES["pi"].files(ACCESS)
    provider = json.loads(files[".pi/agent/models.json"])["providers"]["proxy"]
    assert (provider["baseUrl"], provider["api"]) == ("http://127.0.0.1:8701/v1", "openai-completions")
    assert (provider["models"][0]["contextWindow"], provider["models"][0]["maxTokens"]) == (32768, 4096)


def test_an_unknown_harness_is_refused():
    for ref in (HarnessRef(name="nobody"), HarnessRef(name="pi", profile="nothing")):
        with pytest.raises(InfraError, match=ref.name):
            find(ref)


async def test_what_is_made_is_made_once_and_whole(tmp_path):
    target = tmp_path / "harnesses/x-1"
    made = []

    async def make(part):
        made.append(part)
        (part / "inner").mkdir()
        (part / "inner/file").write_text("x")
        (part / "inner/file").chmod(0o600)
        await asyncio.sleep(0.05)
        assert not target.exists()
        return part / "inner"

    await asyncio.gather(*(make_once(target, make) for _ in range(5)))
    assert len(made) == 1
    assert (target / "file").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in target.parent.iterdir() if not path.name.endswith(".lock")] == ["x-1"]


async def test_what_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    target = tmp_path / "x-1"

    async def fail(part):
        (part / "half").write_text("x")
        raise InfraError("harness_missing", "no network")

    async def succeed(part):
        assert not list(part.iterdir())
        return part

    with pytest.raises(InfraError, match="no network"):
        await make_once(target, fail)
    assert not target.exists()
    await make_once(target, succeed)
    assert target.is_dir()
