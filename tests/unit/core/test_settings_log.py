import json

import pytest

from evener import log, settings
from evener.errors import InputError


def test_environment(monkeypatch):
    monkeypatch.setenv("EVENER_API_PORT", "9000")
    monkeypatch.setenv("EVENER_ENGINE_URLS", '["http://127.0.0.1:1"]')
    here = settings.load()
    assert here.api == "http://127.0.0.1:9000"
    assert here.engines == ["http://127.0.0.1:1"]


def test_a_malformed_setting_names_its_variable(monkeypatch):
    monkeypatch.setenv("EVENER_API_PORT", "many")
    with pytest.raises(InputError, match="EVENER_API_PORT: ") as caught:
        settings.load()
    assert caught.value.exit_code == 2


def test_a_secret_is_not_printed(monkeypatch):
    monkeypatch.setenv("EVENER_API_TOKEN", "hidden-1")
    assert "hidden-1" not in repr(settings.load())


def test_logs_are_json_and_hold_no_secret(tmp_path):
    log.configure(path=tmp_path / "log")
    log.get("proxy").info("opened", session="s", api_key="hidden-1", lease="hidden-2", authorization="hidden-3")
    text = (tmp_path / "log").read_text()
    document = json.loads(text)
    assert document["service"] == "proxy"
    assert document["event"] == "opened"
    assert "hidden" not in text
