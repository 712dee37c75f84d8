"""Every engine of the policy serves the version that was published last, or is being brought to it.

An engine that was restarted serves the weights it was started with, and gets no traffic until it serves ours again; `watch`
reloads it. Engines are updated one at a time, so that the others go on sampling, and an update under way is finished before
the learner stops, for an engine does not survive half of one. Used by `evener_learner.service` and `evener_learner.campaign`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from evener.engines.weights import WeightSink, replace_weights
from evener.errors import InfraError
from evener.log import get

log = get("learner")

WATCH_S = 5.0
"""How often the engines are asked what they serve."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
FINISH_S = 30.0
"""How long a stop waits for the update of one engine."""


class Publisher:
    """The engines of one policy."""

    def __init__(self, sinks: Sequence[WeightSink]) -> None:
        self._sinks = sinks
        self._lock = asyncio.Lock()
        self._current: tuple[int, Path] | None = None

    async def publish(self, version: int, weights: Path, *, force: bool = False) -> None:
        """Bring every engine to ``version``; waits for an engine that is down as long as it is.

        ``force``: also an engine that says that it serves this version: its number may be another policy's.
        """
        async with self._lock:
            for sink in self._sinks:
                await self._bring(sink, version, weights, force=force)
            self._current = (version, weights)

    def forget(self) -> None:
        """Leave the engines alone: another learner owns them."""
        self._current = None

    async def watch(self) -> None:
        """Reload engines that serve something else than was published last, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            async with self._lock:
                if self._current is None:
                    continue
                for sink in self._sinks:
                    try:
                        await self._update(sink, *self._current)
                    except InfraError as error:
                        log.warning("engine not reloaded", engine=sink.name, error=str(error))

    async def _bring(self, sink: WeightSink, version: int, weights: Path, *, force: bool) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await self._update(sink, version, weights, force=force)
            except InfraError as error:
                log.warning(
                    "engine not updated, trying again", engine=sink.name, version=version, wait_s=pause, error=str(error)
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _update(self, sink: WeightSink, version: int, weights: Path, *, force: bool = False) -> None:
        served = await sink.version()
        if served == version and not force:
            return
        log.info("updating engine", engine=sink.name, version=version, served=served)
        update = asyncio.create_task(replace_weights(sink, weights, version))
        try:
            await asyncio.shield(update)
        except asyncio.CancelledError:
            await asyncio.wait({update}, timeout=FINISH_S)
            raise
