"""Node's compile cache of an agent is made once by us and read-only: no agent in bubblewrap plants code for the next one.

V8's code depends on paths, so the agent runs once inside a sandbox like the later ones, with a server that refuses its first
call. Measured with pi 1.6.0: 1.15 instead of 1.38 CPU-s a rollout (medians of 6 rollouts of three calls). Called before an
attempt.
"""

import os
from pathlib import Path

from aiohttp import web

from evener.archive import tar_of_files
from evener.sandbox import HOME, Folder, Kind, Mount, SandboxSpec, create
from evener.tasks import unpack
from evener_runner.harnesses import NODE, Access, Harness
from evener_runner.install import Installation, make_once

COMPILE_CACHE = "/opt/evener/compile-cache"
_REFUSED_RUN_S = 60.0


def folder(kind: Kind, harness: Harness, cache: Path) -> Path:
    """Where the compile cache of an agent is, or would be."""
    # Node keeps a cache a user (its folder's name ends with the user id), and root's sandboxes are another user.
    return cache / "harnesses" / f"{harness.name}-{harness.version}-compile-cache-{kind}-{os.geteuid()}"


async def ensure(kind: Kind, harness: Harness, installation: Installation, cache: Path, sandboxes: Path) -> Path:
    """The compile cache of an agent in sandboxes of this kind, made where it is absent. Raises InfraError."""

    async def make(part: Path) -> Path:
        place = Folder.make(sandboxes, f"compile-{harness.name}-{os.getpid()}", ttl_s=2 * _REFUSED_RUN_S)
        async with _Refusal() as url:
            spec = SandboxSpec(
                place,
                mounts=(Mount(installation.node, NODE), Mount(installation.prefix, harness.prefix)),
                writable=("/workspace", HOME, "/tmp", COMPILE_CACHE),  # noqa: S108 - a path inside
                env=harness.env,
                proxy_url=url,
            )
            sandbox = await create(kind, spec)
            try:
                access = Access(sandbox.proxy_url or url, "none", "policy", 32768)
                await sandbox.upload(tar_of_files(harness.files(access)), HOME)
                command, *arguments = harness.argv("default", access)
                env = {
                    "PATH": f"{sandbox.locate(NODE)}/bin:/usr/local/bin:/usr/bin:/bin",
                    "NODE_COMPILE_CACHE": sandbox.locate(COMPILE_CACHE),
                }
                argv = [sandbox.locate(command), *arguments]
                await sandbox.exec(argv, stdin=b"Hello.", env=env, timeout=_REFUSED_RUN_S)
                made = await sandbox.snapshot(COMPILE_CACHE)
            finally:
                await sandbox.destroy()
        unpack(made.tar, part)
        for file in part.rglob("*"):
            if file.is_file():
                file.chmod(0o444)
        return part

    target = folder(kind, harness, cache)
    await make_once(target, make)
    return target


class _Refusal:
    """A server that refuses every call, so that the agent loads what it needs and ends."""

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", _refuse)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def _refuse(_request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "refused", "type": "invalid_request_error"}}, status=400)
