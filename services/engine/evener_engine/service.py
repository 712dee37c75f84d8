"""The engine as a process. Invariant: it ends within two seconds of SIGTERM, SIGINT or its parent's end.

`evener serve engine` and `python -m evener_engine` call `serve`.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import structlog
import torch
import uvicorn

from .server import Engine

if TYPE_CHECKING:
    import socket
    from pathlib import Path
    from types import FrameType

log = structlog.get_logger("evener.engine")


class _Server(uvicorn.Server):
    """A server that ends with its parent, aborts calls at once when told to stop, and then returns normally."""

    def __init__(self, config: uvicorn.Config, engine: Engine, *, follow_parent: bool) -> None:
        super().__init__(config)
        self._engine = engine
        # Polled: PR_SET_PDEATHSIG fires when the thread that started the process ends, not when the parent does.
        self._parent = os.getppid() if follow_parent else None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._parent is not None and os.getppid() != self._parent:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop()
        await super().shutdown(sockets)


def serve(
    policy: Path,
    host: str,
    port: int,
    *,
    name: str,
    version: int = 1,
    slots: int = 16,
    context_tokens: int | None = None,
    threads: int = 1,
    seed: int | None = None,
    follow_parent: bool = True,
) -> None:
    """Serve the policy folder until told to stop; blocks.

    `name` is the model's name on the wire, `version` the policy version its weights are, `slots` the calls that run at
    once, `context_tokens` the window (default: the policy's). PolicyError: a folder the engine cannot serve. With
    `follow_parent` the process ends when the one that started it does.
    """
    torch.set_num_threads(threads)
    engine = Engine(policy, name=name, version=version, slots=slots, context_tokens=context_tokens, seed=seed)
    config = uvicorn.Config(
        engine.app(),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    # What exists now lives as long as the process: collections under load, and the last one at exit, skip it.
    gc.collect()
    gc.freeze()
    engine.scheduler.start()
    log.info("engine serves", policy=str(policy), model=name, version=version, address=f"{host}:{port}")
    _Server(config, engine, follow_parent=follow_parent).run()
    engine.scheduler.join(1.0)
