"""RabbitMQ, Redis and Postgres as processes that are killed and come back with the same port and data."""

import contextlib
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from tests.services import (
    Process,
    find,
    local_postgres,
    local_rabbit,
    local_redis,
    missing,
    postgres_folders,
    stop_name_server,
)

TRIES = 10
"""Starts of a store: what a killed Postgres left behind refuses the next one for a moment."""


class Store(Protocol):
    """A server of `tests.services`."""

    url: str
    process: Process | None

    def start(self) -> None: ...

    def stop(self) -> None: ...


def start_again(store: Store) -> None:
    """Start a store that was killed."""
    for number in range(1, TRIES + 1):
        try:
            store.start()
        except RuntimeError:
            if number == TRIES:
                raise
            time.sleep(1.0)
        else:
            return


@contextlib.contextmanager
def running_stores() -> Generator[dict[str, Store]]:
    """The three stores by name, started."""
    rabbit, redis = find("rabbitmq-server", Path("/usr/lib/rabbitmq/bin")), find("redis-server")
    initdb, postgres = find("initdb", *postgres_folders()), find("postgres", *postgres_folders())
    if rabbit is None:
        missing("rabbitmq")
    if redis is None:
        missing("redis")
    if initdb is None or postgres is None:
        missing("postgres")
    with contextlib.ExitStack() as exits:
        folders = {
            name: Path(exits.enter_context(tempfile.TemporaryDirectory(prefix=f"evener-{name}-", ignore_cleanup_errors=True)))
            for name in ("rabbitmq", "redis", "postgres")
        }
        broker = local_rabbit(folders["rabbitmq"], rabbit)
        assert broker.process is not None
        exits.callback(stop_name_server, broker.process.env)
        stores: dict[str, Store] = {
            "rabbitmq": broker,
            "redis": local_redis(folders["redis"], redis),
            "postgres": local_postgres(folders["postgres"], initdb, postgres),
        }
        for store in stores.values():
            exits.callback(store.stop)
            store.start()
        yield stores
