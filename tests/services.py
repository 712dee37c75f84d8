"""Real services for tests: from a URL in the environment, else from local binaries, else the tests that need one are skipped.

Where a URL is given, what it names is EMPTIED: the queues, the Redis database; databases are made and dropped. Local
services listen on free ports of 127.0.0.1, keep their data in a temporary folder and are stopped by process id. Skips are
counted in one line at the end of the run; with ``CI=true`` a missing service is a failure instead.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest

from tests.ports import free_port

RABBITMQ = Path(__file__).parent.parent / "compose" / "rabbitmq"
START_S = 180.0
"""Longest start; RabbitMQ takes 7 s on an idle core, 60 and more on one that many share."""

STOP_S = 20.0

INSTALL = {
    "rabbitmq": "apt-get install rabbitmq-server, or set EVENER_TEST_AMQP_URL",
    "redis": "apt-get install redis-server, or set EVENER_TEST_REDIS_URL",
    "postgres": "apt-get install postgresql, or set EVENER_TEST_DATABASE_URL",
}


def missing(service: str) -> NoReturn:
    """Skip the test, or fail it on CI."""
    reason = f"needs {service}: {INSTALL[service]}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def find(program: str, *folders: Path) -> Path | None:
    """A program in one of ``folders``, else on the path."""
    found = shutil.which(program, path=os.pathsep.join(map(str, folders))) or shutil.which(program)
    return Path(found) if found else None


@dataclass
class Process:
    """One service process in its own group, stopped by its id."""

    argv: list[str]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    _popen: subprocess.Popen[bytes] | None = None

    def start(self, answers: Callable[[], bool]) -> None:
        """Start it and wait until it answers. Raises RuntimeError with the end of its output."""
        account = pwd.getpwnam(self.user) if self.user else None
        with (self.folder / "output").open("ab") as output:
            self._popen = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**os.environ, **self.env},
                stdout=output,
                stderr=output,
                start_new_session=True,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )
        deadline = time.monotonic() + START_S
        while not answers():
            if self._popen.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = (self.folder / "output").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.argv[0]} did not start within {START_S:g} s:\n{tail}")
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        """The id of the process that was started. Raises RuntimeError where none runs."""
        if self._popen is None:
            raise RuntimeError(f"{self.argv[0]} does not run")
        return self._popen.pid

    def kill(self) -> None:
        """End it at once, as a crash does."""
        group, self._popen = self._popen, None
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
            group.wait(STOP_S)

    def stop(self) -> None:
        """Ask it to stop, then insist."""
        if self._popen is None:
            return
        group, self._popen = self._popen, None
        if group.poll() is None:
            group.send_signal(self.stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            group.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)
        group.wait(STOP_S)


def answers(host: str, port: int, greeting: bytes, reply: bytes) -> bool:
    """Whether a server at ``port`` answers ``greeting`` with ``reply``."""
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.sendall(greeting)
            return connection.recv(len(reply)) == reply
    except OSError:
        return False


def speaks_amqp(url: str) -> bool:
    """Whether a broker at ``url`` opens the AMQP 0-9-1 handshake (a method frame on channel 0)."""
    parts = urlsplit(url)
    return answers(parts.hostname or "127.0.0.1", parts.port or 5672, b"AMQP\x00\x00\x09\x01", b"\x01\x00\x00")


@dataclass
class Server:
    """A store of ours, which may be killed and started again with the same port and data."""

    url: str
    process: Process
    answers: Callable[[], bool]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process.start(self.answers)

    def stop(self) -> None:
        """Stop it; its data stays."""
        self.process.stop()


@dataclass
class Rabbit:
    """A broker; ``process`` only where it is ours to stop."""

    url: str
    process: Process | None = None

    @property
    def restartable(self) -> bool:
        """Whether `stop` and `start` work."""
        return self.process is not None

    def start(self) -> None:
        """Start it (again, with the same port and data)."""
        assert self.process is not None, "not our broker"
        self.process.start(lambda: speaks_amqp(self.url))

    def stop(self) -> None:
        """Stop it; its data stays."""
        assert self.process is not None, "not our broker"
        self.process.stop()

    def evaluate(self, erlang: str) -> None:
        """Run an expression inside it: alarms and deadlines that would take long to come by themselves."""
        assert self.process is not None, "not our broker"
        ctl = find("rabbitmqctl", Path("/usr/lib/rabbitmq/bin"))
        env = {**os.environ, **self.process.env}
        ran = subprocess.run([str(ctl), "eval", erlang], env=env, capture_output=True, text=True, timeout=START_S)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def rabbit_configuration(folder: Path, port: int) -> None:
    """The configuration of `compose/`, with paths and address of this broker, and a user."""
    definitions = folder / "definitions.d"
    definitions.mkdir()
    shutil.copy(RABBITMQ / "definitions.json", definitions)
    user = {"name": "evener", "password": "evener", "tags": []}
    permission = {"user": "evener", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    (definitions / "users.json").write_text(json.dumps({"users": [user], "permissions": [permission]}))
    text = (RABBITMQ / "rabbitmq.conf").read_text()
    for there, here in {
        "/etc/rabbitmq/definitions.d": str(definitions),
        "listeners.tcp.default = 5672": f"listeners.tcp.1 = 127.0.0.1:{port}",
        "disk_free_limit.absolute = 1GB": "disk_free_limit.absolute = 10MB",
    }.items():
        assert there in text, f"{there} is not in rabbitmq.conf"
        text = text.replace(there, here)
    (folder / "rabbitmq.conf").write_text(text)


def local_rabbit(folder: Path, server: Path) -> Rabbit:
    """A broker with its own name server, cookie, plugins and data: it meets no other on this machine."""
    port, epmd = free_port(), free_port()
    rabbit_configuration(folder, port)
    (folder / "enabled_plugins").write_text("[].\n")
    env = {
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(epmd),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"evener{port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
    }
    process = Process([str(server)], folder, env)
    return Rabbit(f"amqp://evener:evener@127.0.0.1:{port}/", process)


def stop_name_server(env: Mapping[str, str]) -> None:
    """Stop the Erlang port mapper that the broker left behind, by its port; it refuses while it still knows the broker."""
    epmd = find("epmd")
    command = [str(epmd), "-port", env["ERL_EPMD_PORT"], "-kill"]
    for _ in range(50):
        if epmd is None or not accepts(int(env["ERL_EPMD_PORT"])):
            return
        subprocess.run(command, env={**os.environ, **env}, capture_output=True, timeout=STOP_S)
        time.sleep(0.1)


def accepts(port: int) -> bool:
    """Whether something listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running_rabbit() -> Generator[Rabbit]:
    """The broker of the environment, or one of ours."""
    url = os.environ.get("EVENER_TEST_AMQP_URL")
    if url:
        assert speaks_amqp(url), "nothing speaks AMQP at EVENER_TEST_AMQP_URL"
        yield Rabbit(url)
        return
    server = find("rabbitmq-server", Path("/usr/lib/rabbitmq/bin"))  # /usr/sbin has a wrapper that insists on its own user
    if server is None:
        missing("rabbitmq")
    with tempfile.TemporaryDirectory(prefix="evener-rabbitmq-", ignore_cleanup_errors=True) as folder:
        rabbit = local_rabbit(Path(folder), server)
        assert rabbit.process is not None
        try:
            rabbit.start()
            yield rabbit
        finally:
            rabbit.stop()
            stop_name_server(rabbit.process.env)


@contextlib.contextmanager
def running_redis() -> Generator[str]:
    """URL of the Redis of the environment, or of one of ours, set as the proxy wants it."""
    url = os.environ.get("EVENER_TEST_REDIS_URL")
    if url:
        yield url
        return
    server = find("redis-server")
    if server is None:
        missing("redis")
    with tempfile.TemporaryDirectory(prefix="evener-redis-") as folder:
        redis = local_redis(Path(folder), server)
        try:
            redis.start()
            yield redis.url
        finally:
            redis.stop()


def local_redis(folder: Path, server: Path) -> Server:
    """A Redis whose data lies in ``folder``."""
    port = free_port()
    argv = [str(server), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", "", "--appendonly", "yes"]
    process = Process([*argv, "--maxmemory-policy", "noeviction"], folder)
    return Server(f"redis://127.0.0.1:{port}/0", process, lambda: answers("127.0.0.1", port, b"PING\r\n", b"+PONG"))


def postgres_folders() -> list[Path]:
    """Where Debian keeps the server's programs, newest first."""
    versions = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    return sorted(versions, key=lambda path: int(path.parent.name), reverse=True)


def unprivileged() -> str | None:
    """The user that Postgres runs as: it refuses root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextlib.contextmanager
def running_postgres() -> Generator[str]:
    """URL of the Postgres of the environment, or of one of ours (without fsync)."""
    url = os.environ.get("EVENER_TEST_DATABASE_URL")
    if url:
        yield url
        return
    initdb, server = find("initdb", *postgres_folders()), find("postgres", *postgres_folders())
    if initdb is None or server is None:
        missing("postgres")
    with tempfile.TemporaryDirectory(prefix="evener-postgres-") as folder:
        postgres = local_postgres(Path(folder), initdb, server)
        try:
            postgres.start()
            yield postgres.url
        finally:
            postgres.stop()


def local_postgres(folder: Path, initdb: Path, server: Path) -> Server:
    """A new Postgres whose data lies in ``folder``."""
    user, port = unprivileged(), free_port()
    if user is not None:
        shutil.chown(folder, user)
    owner = pwd.getpwnam(user).pw_uid if user else None
    subprocess.run(
        [str(initdb), "-D", str(folder / "data"), "-U", "evener", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"],
        cwd=folder, user=owner, check=True, capture_output=True, timeout=START_S,
    )  # fmt: skip
    argv = [str(server), "-D", str(folder / "data"), "-p", str(port), "-k", str(folder)]
    for option in ("listen_addresses=127.0.0.1", "fsync=off", "max_connections=100"):
        argv += ["-c", option]
    process = Process(argv, folder, user=user, stop_signal=signal.SIGINT)  # the "fast" shutdown: ends sessions
    # an SSLRequest; a server without TLS says N
    probe = bytes.fromhex("0000000804d2162f")
    url = f"postgresql+asyncpg://evener@127.0.0.1:{port}/postgres"
    return Server(url, process, lambda: answers("127.0.0.1", port, probe, b"N"))
