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


def test_secrets_come_from_files_and_the_environment_goes_first(monkeypatch, tmp_path):
    for name, text in {
        "api_token": "from-file\n",
        "database_url": "postgresql+asyncpg://u:p@db/d",
        "redis_url": "redis://f",
    }.items():
        (tmp_path / f"evener_{name}").write_text(text)
    monkeypatch.setenv("EVENER_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("EVENER_REDIS_URL", "redis://environment")
    here = settings.load()
    assert here.api_token.get_secret_value() == "from-file"
    assert here.database == "postgresql+asyncpg://u:p@db/d"
    assert here.redis_url == "redis://environment"


def test_a_folder_of_secrets_that_is_absent_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("EVENER_SECRETS_DIR", str(tmp_path / "none"))
    with pytest.raises(InputError, match="EVENER_SECRETS_DIR: ") as caught:
        settings.load()
    assert caught.value.exit_code == 2


def test_the_usual_folder_of_secrets_is_read_where_it_exists(monkeypatch, tmp_path):
    (tmp_path / "evener_admin_token").write_text("from-file")
    monkeypatch.delenv("EVENER_SECRETS_DIR", raising=False)
    monkeypatch.setattr(settings, "DEFAULT_SECRETS", tmp_path)
    assert settings.load().admin_token.get_secret_value() == "from-file"
    monkeypatch.setattr(settings, "DEFAULT_SECRETS", tmp_path / "none")
    assert settings.load().admin_token.get_secret_value() == ""
