"""Training runs in one thread, and nobody waits on it for ever: a step ends with its result, its error, or `Stopped`.

`Feed` is the thread's side: it takes steps and gives results. `TrainerThread` is asyncio's side. Used by
`evener_learner.campaign` and by the trainer.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener_learner.admission import Row

JOIN_S = 10.0
"""How long a stop waits for the thread; it looks at the flag between micro-batches, each of which takes a second or two."""


class Stopped(Exception):
    """The learner stops: training ends here."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step made: a policy folder, figures, and the optimizer's state where one was due."""

    weights: Path
    metrics: dict[str, float]
    checkpoint: Path | None


class Feed:
    """The training thread's side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: queue.SimpleQueue[Sequence[Row] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ended: BaseException | None = None
        self._ready: Future[None] = _running()
        self._result: Future[StepResult] | None = None

    def ready(self) -> None:
        """The policy is loaded."""
        self._ready.set_result(None)

    def next(self) -> Sequence[Row]:
        """Wait for the rows of the next step. Raises Stopped at once when the learner stops."""
        rows = self._steps.get()
        if rows is None:
            raise Stopped
        return rows

    def check(self) -> None:
        """Raise Stopped when the learner stops: called between the micro-batches of a step."""
        if self._stopping.is_set():
            raise Stopped

    def done(self, result: StepResult) -> None:
        """Give the result of the step that `next` returned."""
        with self._lock:
            assert self._result is not None, "a step was finished that nobody asked for"
            self._result.set_result(result)
            self._result = None

    def end(self, error: BaseException) -> None:
        """Training is over: whoever waits, now or later, gets ``error``."""
        with self._lock:
            self._ended = error
            for future in (self._ready, self._result):
                if future is not None and not future.done():
                    future.set_exception(error)

    async def wait_ready(self) -> None:
        """Wait until the policy is loaded, or raise what prevented it."""
        await asyncio.wrap_future(self._ready)

    async def submit(self, rows: Sequence[Row]) -> StepResult:
        """Train one step. Raises what the step raised."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            assert self._result is None, "one step at a time"
            result = self._result = _running()
            self._steps.put(rows)
        return await asyncio.wrap_future(result)

    def stop(self) -> None:
        """Let `next` and `check` raise Stopped."""
        self._stopping.set()
        self._steps.put(None)


class TrainerThread:
    """Runs ``train(feed)`` in a thread of its own; use it as an async context manager, which waits for the loaded policy."""

    def __init__(self, train: Callable[[Feed], None]) -> None:
        self._train = train
        self._feed = Feed()
        self._thread = threading.Thread(target=self._main, name="trainer", daemon=True)

    async def __aenter__(self) -> "TrainerThread":
        self._thread.start()
        try:
            await self._feed.wait_ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def train(self, rows: Sequence[Row]) -> StepResult:
        """Train one step on exactly ``rows``. Raises what the step raised, or Stopped."""
        return await self._feed.submit(rows)

    async def _stop(self) -> None:
        self._feed.stop()
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _main(self) -> None:
        try:
            self._train(self._feed)
        except BaseException as error:  # noqa: BLE001 - the thread's supervisor: whoever waits for the step gets the error
            self._feed.end(error)
        else:
            self._feed.end(Stopped())


def _running() -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # so that a cancelled waiter cannot cancel it under the thread
    return future
