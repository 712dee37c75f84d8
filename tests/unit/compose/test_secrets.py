"""compose/init/secrets.py: made once, kept, and given to those alone who need them."""

import base64
import hashlib
import importlib.util
import json
import stat
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

COMPOSE = Path(__file__).parents[3] / "compose"
SERVICES = ("master", "postgres", "redis", "rabbitmq", "orchestrator", "proxy", "runner", "verifier", "learner", "cli")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compose_secrets", COMPOSE / "init" / "secrets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for service in SERVICES:
        (tmp_path / service).mkdir()
    return tmp_path


def start(script: ModuleType, folder: Path) -> dict[str, str]:
    script.main(folder, COMPOSE / "rabbitmq" / "definitions.json")
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_each_service_gets_its_own_and_no_other(script: ModuleType, folder: Path):
    files = start(script, folder)
    given = {service: {name.split("/")[1] for name in files if name.startswith(f"{service}/")} for service in SERVICES}
    assert given == {
        "master": {"secrets.json"},
        "postgres": {"password"},
        "redis": {"password", "redis.conf"},
        "rabbitmq": {"definitions.json", "users.json"},
        "orchestrator": {
            "evener_api_token",
            "evener_admin_token",
            "evener_database_url",
            "evener_redis_url",
            "evener_amqp_url",
        },
        "proxy": {"evener_admin_token", "evener_redis_url"},
        "runner": {"evener_api_token", "evener_admin_token", "evener_amqp_url"},
        "verifier": {"evener_api_token", "evener_amqp_url"},
        "learner": {"evener_api_token", "evener_amqp_url"},
        "cli": {"evener_api_token"},
    }


def test_the_same_at_every_start(script: ModuleType, folder: Path):
    assert start(script, folder) == start(script, folder)


def test_others_elsewhere(script: ModuleType, folder: Path, tmp_path_factory: pytest.TempPathFactory):
    other = tmp_path_factory.mktemp("other")
    for service in SERVICES:
        (other / service).mkdir()
    assert set(start(script, folder).values()).isdisjoint(
        set(start(script, other).values()) - {(COMPOSE / "rabbitmq/definitions.json").read_text()}
    )


def test_an_interrupted_start_is_completed(script: ModuleType, folder: Path):
    whole = start(script, folder)
    (folder / "learner" / "evener_amqp_url").unlink()
    (folder / "runner" / ".evener_api_token.part").write_text("half")
    assert start(script, folder) == whole


def test_what_a_later_version_adds_is_made_and_the_rest_kept(script: ModuleType, folder: Path):
    before = start(script, folder)
    master = folder / "master" / "secrets.json"
    known = json.loads(master.read_text())
    del known["admin_token"]
    master.unlink()
    master.write_text(json.dumps(known))
    after = start(script, folder)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"master/secrets.json"} | {name for name in before if name.endswith("evener_admin_token")}


def test_nobody_else_may_read_ours(script: ModuleType, folder: Path):
    start(script, folder)
    for path in folder.rglob("*"):
        if path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o444 if path.parent.name in ("postgres", "redis", "rabbitmq") else 0o400), path


def test_urls_carry_the_passwords_that_the_stores_were_given(script: ModuleType, folder: Path):
    files = start(script, folder)
    database = urlsplit(files["orchestrator/evener_database_url"])
    assert (database.scheme, database.username, database.hostname) == ("postgresql+asyncpg", "evener", "postgres")
    assert database.password == files["postgres/password"]
    assert urlsplit(files["proxy/evener_redis_url"]).password == files["redis/password"]
    assert files["redis/redis.conf"] == f"requirepass {files['redis/password']}\n"


def test_rabbitmq_accepts_the_password(script: ModuleType, folder: Path):
    files = start(script, folder)
    password = urlsplit(files["runner/evener_amqp_url"]).password
    assert password is not None
    (user,) = json.loads(files["rabbitmq/users.json"])["users"]
    stored = base64.b64decode(user["password_hash"])
    assert stored[4:] == hashlib.sha256(stored[:4] + password.encode()).digest()
    assert json.loads(files["rabbitmq/definitions.json"])["policies"]
