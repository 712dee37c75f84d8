"""Every secret of a deployment is made once, and each service is given only those that it needs.

The `init` service runs this before every other, at each `docker compose up`. What was made is in ``master/secrets.json``; the
files of the services are written from it again each time, so that an upgrade or an interrupted first start ends complete.
Standard library only: the image has nothing else. Usage: secrets.py FOLDER DEFINITIONS
"""

import base64
import hashlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

OURS = 0o400
"""Read by our own images, which run as the user that runs this."""
THEIRS = 0o444
"""Read by Postgres, Redis and RabbitMQ, whose users have other numbers: the volume is mounted there and nowhere else."""
NAMES = ("api_token", "admin_token", "database_password", "redis_password", "amqp_password", "amqp_salt")


class Place(NamedTuple):
    """A file of one service."""

    service: str
    file: str
    content: str
    mode: int = OURS


def main(folder: Path, definitions: Path) -> None:
    """Make what is absent in ``folder/master``, and write ``folder/{service}/{file}`` for every service."""
    made = make(folder / "master" / "secrets.json")
    for place in places(made, definitions.read_text()):
        write(folder / place.service / place.file, place.content, place.mode)
    print(f"secrets: {len(made)} made or kept")


def make(path: Path) -> dict[str, str]:
    """The secrets by name: those of the file ``path``, and a new one for each that it lacks."""
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    lacking = [name for name in NAMES if name not in known]
    if lacking:
        known |= {name: secrets.token_hex(4 if name == "amqp_salt" else 32) for name in lacking}
        write(path, json.dumps(known, indent=1), OURS)
    return known


def places(made: dict[str, str], definitions: str) -> list[Place]:
    """What is written where. ``definitions`` are RabbitMQ's policies; it reads them beside its users."""
    api, admin = made["api_token"], made["admin_token"]
    database = f"postgresql+asyncpg://evener:{made['database_password']}@postgres:5432/evener"
    redis = f"redis://:{made['redis_password']}@redis:6379/0"
    amqp = f"amqp://evener:{made['amqp_password']}@rabbitmq:5672/"
    return [
        Place("postgres", "password", made["database_password"], THEIRS),
        Place("redis", "redis.conf", f"requirepass {made['redis_password']}\n", THEIRS),
        Place("redis", "password", made["redis_password"], THEIRS),
        Place("rabbitmq", "definitions.json", definitions, THEIRS),
        Place("rabbitmq", "users.json", json.dumps(users(made["amqp_password"], bytes.fromhex(made["amqp_salt"]))), THEIRS),
        *(
            Place(service, file, content)
            for file, content, services in (
                ("evener_api_token", api, ("orchestrator", "runner", "verifier", "learner", "cli")),
                ("evener_admin_token", admin, ("orchestrator", "proxy", "runner")),
                ("evener_database_url", database, ("orchestrator",)),
                ("evener_redis_url", redis, ("orchestrator", "proxy")),
                ("evener_amqp_url", amqp, ("orchestrator", "runner", "verifier", "learner")),
            )
            for service in services
        ),
    ]


def users(password: str, salt: bytes) -> dict[str, object]:
    """RabbitMQ's user, with the password as it stores it: base64(salt + SHA-256(salt + password)), salt of 4 bytes."""
    digest = hashlib.sha256(salt + password.encode()).digest()
    return {
        "users": [
            {
                "name": "evener",
                "password_hash": base64.b64encode(salt + digest).decode(),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": [],
            }
        ],
        "permissions": [{"user": "evener", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}],
    }


def write(path: Path, content: str, mode: int) -> None:
    """Write a file whole or not at all, never readable by more than ``mode`` says."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.chmod(mode)
    part.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
