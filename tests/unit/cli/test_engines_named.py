"""Engines that the settings name are used as they are, and none is started beside them."""

from pathlib import Path

import pytest

from evener.cli import embedded
from evener.errors import InfraError
from evener.settings import Settings
from tests.unit.learner.engines import StubEngine, serving


async def test_named_engines_are_used_and_none_is_started(tmp_path: Path) -> None:
    async with serving(StubEngine().handle) as url:  # it does not know /health, as hosted APIs do not
        settings = Settings(data=tmp_path, engine_urls=[url])
        async with embedded._engine(settings, tmp_path / "no policy", "policy"):
            assert list(tmp_path.iterdir()) == []


async def test_a_named_engine_that_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "ENGINE_START_S", 0.2)
    settings = Settings(data=tmp_path, engine_urls=["http://127.0.0.1:9"])
    with pytest.raises(InfraError, match=r"127\.0\.0\.1:9 .*EVENER_ENGINE_URLS"):
        async with embedded._engine(settings, tmp_path, "policy"):
            raise AssertionError
