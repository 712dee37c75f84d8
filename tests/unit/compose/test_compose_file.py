"""What compose/compose.yaml promises, read without Docker; `make test-stack` starts it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
WORKERS = ["runner", "verifier", "learner"]


def mounted(name: str) -> dict[str, str]:
    """Volume or folder by mount point."""
    parts = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":") for volume in SERVICES[name].get("volumes", [])]
    return {part[1]: part[0] for part in parts if len(part) > 1}


def writes(name: str) -> set[str]:
    return {v.split(":")[0] for v in SERVICES[name].get("volumes", []) if not v.endswith(":ro")}


def test_the_root_file_includes_it():
    assert yaml.safe_load((ROOT / "compose.yaml").read_text()) == {"name": "evener", "include": ["compose/compose.yaml"]}


@pytest.mark.parametrize("name", SERVICES)
def test_published_on_the_loopback_only(name: str):
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_has_a_health_check(name: str):
    check = SERVICES[name]["healthcheck"]
    assert check.get("test") or (name == "cli" and check["disable"])


@pytest.mark.parametrize("name", OURS)
def test_ours_run_as_a_user_without_capabilities(name: str):
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert not {"privileged", "cap_add", "pid", "ipc", "userns_mode"} & service.keys()
    assert "no-new-privileges:true" in service["security_opt"]


def test_every_image_ends_as_that_user():
    stages = (ROOT / "compose/docker/Dockerfile").read_text().split("\nFROM ")[1:]
    last_user = {
        match[1]: re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
        for stage in stages
        if (match := re.match(r"\S+ AS (\S+)", stage))
    }
    targets = {SERVICES[name]["build"]["target"] for name in OURS}
    assert targets == set(OURS)
    assert {target: last_user[target] for target in targets} == {target: ["evener"] for target in targets}


def test_nothing_hidden_from_docker_is_mounted():
    assert not any("docker.sock" in str(service) for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_relaxed_only_where_sandboxes_are_made(name: str):
    relaxed = [option for option in SERVICES[name].get("security_opt", []) if "no-new-privileges" not in option]
    assert bool(relaxed) == (name in ("runner", "verifier"))
    if relaxed:
        assert SERVICES[name]["environment"]["EVENER_SANDBOX"] == "bubblewrap"
        assert not any("seccomp=unconfined" in option for option in relaxed)


@pytest.mark.parametrize("name", WORKERS)
def test_workers_reach_neither_database_nor_cache(name: str):
    stores = {network for store in ("postgres", "redis") for network in SERVICES[store]["networks"]}
    assert stores.isdisjoint(SERVICES[name]["networks"])


def test_only_the_api_can_be_reached_from_outside():
    outside = {name for name, network in DOCUMENT["networks"].items() if not (network or {}).get("internal")}
    assert outside == {"published"}
    assert {name for name, service in SERVICES.items() if outside & set(service.get("networks", []))} == {"orchestrator"}
    assert SERVICES["init"]["network_mode"] == "none"


def test_held_out_a_runner_mounts_no_tests():
    volumes = set(mounted("runner").values())
    assert "blobs-grader" not in volumes
    assert "blobs-agent" in volumes
    assert not any(path == "/var/lib/evener/blobs" for name in SERVICES for path in mounted(name))


def test_each_store_has_its_writers():
    writers = {
        area: {name for name in SERVICES if f"blobs-{area}" in writes(name)} - {"orchestrator"}
        for area in ("agent", "grader", "snapshots", "logs", "weights", "checkpoints")
    }
    assert writers == {
        "agent": set(),
        "grader": set(),
        "snapshots": {"runner"},
        "logs": {"runner"},
        "weights": {"learner"},
        "checkpoints": {"learner"},
    }


def test_secrets_are_a_service_s_own():
    for name in SERVICES:
        if name == "init":
            continue
        secrets = {volume for volume in mounted(name).values() if volume.startswith("secrets-")}
        assert secrets <= {f"secrets-{name}"}, name
        assert f"secrets-{name}" not in writes(name)


def test_engine_and_learner_see_weights_under_one_path():
    path = "/var/lib/evener/learner"
    assert mounted("engine")[path] == mounted("learner")[path] == "weights"
    assert "weights" not in writes("engine")


@pytest.mark.parametrize("name", ["proxy", "runner", "verifier"])
def test_can_be_scaled(name: str):
    assert not {"container_name", "ports", "hostname"} & SERVICES[name].keys()


def test_every_service_starts_after_what_it_needs():
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if needed == "init" else "service_healthy"
            assert how["condition"] == expected, (name, needed)


def test_the_broker_keeps_its_name():
    # RabbitMQ's folder is named after its host.
    assert SERVICES["rabbitmq"]["hostname"] == "rabbitmq"


def test_redis_loses_nothing():
    lines = (ROOT / "compose/redis/redis.conf").read_text().splitlines()
    assert {"maxmemory-policy noeviction", "appendonly yes", "appendfsync always"} <= set(lines)


def test_what_an_image_is_built_from_is_in_its_context():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    dockerfile = (ROOT / "compose/docker/Dockerfile").read_text()
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?(.+) \S+$", dockerfile, re.MULTILINE)
    for source in {source for sources in copied for source in sources.split()}:
        assert f"!{source}" in ignored, source
        assert (ROOT / source).exists(), source
