"""Continuous batching. Invariant: every call ends exactly once, and each token bears the version that made it.

One thread owns the model, the rows and the prefix store. The server's event loop hands it calls and commands; commands
(pause, resume, swap) run between two steps, so a step never sees two sets of weights. After a swap the keys and values
of running calls are computed anew: a token is conditioned on nothing an older version computed.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy
import structlog
import torch

from .model import Rows, Trunk
from .prefixes import TRUNK_MIN, Parked, PrefixStore, common, rebase
from .sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .model import Model
    from .sampling import Sampling
    from .weights import Weights

log = structlog.get_logger("evener.engine")
PauseMode = Literal["keep", "wait", "abort"]
Finish = Literal["stop", "length", "abort", "error"]
_T = TypeVar("_T")


@dataclass
class Span:
    """Tokens `start:end` of a call were sampled by weights `version`."""

    version: str
    start: int
    end: int


@dataclass(eq=False)
class Call:
    """One request. `done` is called once, from the scheduler's thread, when `finish` is set."""

    prompt: list[int]
    sampling: Sampling
    done: Callable[[Call], None]
    decode: Callable[[list[int]], str]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[Span] = field(default_factory=list[Span])
    finish: Finish | None = None
    stop_reason: str | int | None = None
    cancelled: bool = False
    draws: list[float] = field(default_factory=list[float])

    def emit(self, token: int, logprob: float, version: str, eos: frozenset[int]) -> None:
        """Append a token, and set `finish` where it ends the call."""
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(Span(version, len(self.tokens), len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.spans[-1].end += 1
        how = self.sampling
        if token in eos and not how.ignore_eos:
            self.finish = "stop"
        elif token in how.stop_ids:
            self.finish, self.stop_reason = "stop", token
        elif how.stop and (found := self._stop_string()) is not None:
            self.finish, self.stop_reason = "stop", found
        elif len(self.tokens) >= how.max_tokens:
            self.finish = "length"

    def _stop_string(self) -> str | None:
        # A token adds at least one byte and a character has at most four: older tokens are part of no new match.
        window = 4 * max(map(len, self.sampling.stop)) + 4
        text = self.decode(self.tokens[-window:])
        return next((stop for stop in self.sampling.stop if stop in text), None)


@dataclass(eq=False)
class _Row:
    call: Call
    key: int
    trunk: Trunk | None
    ids: list[int]  # the prompt, then what was sampled; all but the last have keys and values

    @property
    def tail(self) -> int:
        """Tokens behind the trunk whose keys and values are held."""
        return len(self.ids) - 1 - self.base

    @property
    def base(self) -> int:
        """Tokens in the trunk."""
        return self.trunk.length if self.trunk else 0


class Scheduler:
    """Runs calls on a model, at most `slots` at once; the rest wait in order."""

    def __init__(self, model: Model, *, version: str, slots: int, eos: frozenset[int], seed: int | None) -> None:
        self.version = version
        self._model = model
        self._slots = slots
        self._eos = eos
        self._rows = Rows(model.arch, slots)
        self._active: list[_Row] = []
        self._store = PrefixStore(self._move)
        self._seeds = torch.Generator()
        _ = self._seeds.seed() if seed is None else self._seeds.manual_seed(seed)
        self._keys = itertools.count()
        self._wake = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._drained: list[Future[None]] = []
        self._paused: PauseMode | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def paused(self) -> bool:
        """Whether new calls wait."""
        return self._paused is not None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Abort every call and end the thread; returns at once."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, call: Call) -> None:
        """Queue a call. After `stop` it is aborted at once."""
        call.draws = call.sampling.draws(int(torch.randint(2**62, (), generator=self._seeds)))
        with self._wake:
            if not self._stopping:
                self._waiting.append(call)
                self._wake.notify()
                return
        self._end(call, "abort")

    def cancel(self, call: Call) -> None:
        """End a call whose client left; its row is free at the next step."""
        with self._wake:
            call.cancelled = True
            self._wake.notify()

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stop sampling. `keep` freezes running calls, `wait` lets them finish first, `abort` ends them."""
        drained: Future[None] = Future()

        def command() -> None:
            self._paused = mode
            if mode == "abort":
                self._abort_active()
            if clear_cache:
                self._store.clear()
            if mode == "wait" and self._active:
                self._drained.append(drained)
            else:
                drained.set_result(None)

        self._command(command)
        return drained

    def resume(self) -> Future[None]:
        """Go on after `pause`."""

        def command() -> None:
            self._paused = None
            self._release_waiters()

        return self._command(command)

    def swap(self, weights: Weights, version: str) -> Future[None]:
        """Serve `weights` as `version` from the next step on."""

        def command() -> None:
            running = [row.trunk for row in self._active if row.trunk is not None]
            trunks = {id(trunk): trunk for trunk in self._store.clear() + running}
            self._model.weights, self.version = weights, version
            renewed = {key: self._compute_trunk(trunk.ids) for key, trunk in trunks.items()}
            for index, row in enumerate(self._active):
                row.trunk = renewed.get(id(row.trunk))
                if row.tail:
                    self._model.prefill(row.ids[:-1], self._rows, index, row.trunk, row.base)

        return self._command(command)

    def score(self, ids: Sequence[int]) -> Future[list[float]]:
        """Log-probability of each of `ids[1:]` under the weights that are served, between two steps."""

        def command() -> list[float]:
            scored: list[float] = self._model.score(ids).tolist()
            return scored

        return self._command(command)

    def _command(self, command: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001  the caller gets it
                self._abort_active("error")
                future.set_exception(error)

        with self._wake:
            if self._stopping:
                future.set_exception(RuntimeError("the engine is stopping"))
            else:
                self._commands.append(run)
                self._wake.notify()
        return future

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._wake:
                while not self._has_work():
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
                stopping = self._stopping
            for command in commands:
                command()
            if stopping:
                break
            self._supervised_step()
        self._abort_active()
        with self._wake:
            waiting, self._waiting = list(self._waiting), deque()
        for call in waiting:
            self._end(call, "abort")
        self._release_waiters()

    def _release_waiters(self) -> None:
        drained, self._drained = self._drained, []
        for future in drained:
            future.set_result(None)

    def _has_work(self) -> bool:
        stepping = bool(self._active) and self._paused in (None, "wait")
        admitting = bool(self._waiting) and self._paused is None
        cancelled = any(row.call.cancelled for row in self._active) or any(call.cancelled for call in self._waiting)
        return self._stopping or bool(self._commands) or stepping or admitting or cancelled

    def _supervised_step(self) -> None:
        try:
            self._reap()
            if self._paused is None:
                self._admit()
            if self._active and self._paused in (None, "wait"):
                self._step()
        except Exception:
            # The rows are in an unknown state: no running call may go on from them.
            log.exception("step failed; its calls end", calls=len(self._active))
            self._abort_active("error")
            self._store.clear()
        if not self._active:
            self._release_waiters()

    def _reap(self) -> None:
        for index in reversed(range(len(self._active))):
            if self._active[index].call.cancelled:
                self._release(index, "abort")
        with self._wake:
            cancelled = [call for call in self._waiting if call.cancelled]
            for call in cancelled:
                self._waiting.remove(call)
        for call in cancelled:
            self._end(call, "abort")

    def _admit(self) -> None:
        while len(self._active) < self._slots and not self._stopping:
            with self._wake:
                if not self._waiting:
                    return
                call = self._waiting.popleft()
            index = len(self._active)
            row = _Row(call, next(self._keys), None, list(call.prompt))
            self._active.append(row)
            ids = numpy.asarray(call.prompt, numpy.int32)
            known = self._reuse(index, row, ids)
            logits = self._model.prefill(row.ids, self._rows, index, row.trunk, known)
            if len(ids) - known > 1:  # else another call's parked tail covers it
                kv = self._rows.read(index, 0, len(ids) - row.base)
                self._store.park(row.key, Parked(ids, len(ids), row.trunk, kv))
            self._sample(logits, index, [row])

    def _reuse(self, index: int, row: _Row, ids: numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]) -> int:
        """Give the row its trunk and what is known behind it; how many ids need no computing."""
        # The row under admission is not among those a shrinking trunk moves: it holds nothing yet.
        trunk, kv = self._store.match(ids)
        if trunk is None and len(ids) > TRUNK_MIN:
            trunk, kv = self._compute_trunk(ids[:-1]), None  # the trunk covers what a trunkless tail may have given
        row.trunk = trunk
        if kv is not None:
            self._rows.write(index, kv)
        return row.base + (kv.shape[3] if kv is not None else 0)

    def _compute_trunk(self, ids: numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]) -> Trunk:
        scratch = Rows(self._model.arch, 1)
        self._model.prefill(ids.tolist(), scratch, 0, None, 0)
        trunk = Trunk(ids, scratch.read(0, 0, len(ids)))
        self._store.hold(trunk)
        return trunk

    def _move(self, old: Trunk, new: Trunk) -> None:
        for index, row in enumerate(self._active):
            if row.trunk is old and common(numpy.asarray(row.ids[:-1], numpy.int32), new.ids) == new.length:
                self._rows.write(index, rebase(self._rows.read(index, 0, row.tail), old, new))
                row.trunk = new

    def _step(self) -> None:
        rows = self._active
        logits = self._model.decode(
            [row.ids[-1] for row in rows], [row.tail for row in rows], [row.trunk for row in rows], self._rows
        )
        self._sample(logits, 0, list(rows))

    def _sample(self, logits: torch.Tensor, first: int, rows: Sequence[_Row]) -> None:
        """Sample for `rows`, which start at index `first`, and release those that end."""
        calls = [row.call for row in rows]
        draws = [call.draws[len(call.tokens)] for call in calls]
        tokens, logprobs = sample(logits, [call.sampling for call in calls], draws)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.call.emit(token, logprob, self.version, self._eos)
            row.ids.append(token)
        for index in reversed(range(first, first + len(rows))):
            if (finish := self._active[index].call.finish) is not None:
                self._release(index, finish)

    def _release(self, index: int, finish: Finish) -> None:
        """End the call in row `index`; the last row takes its place, so that rows stay dense."""
        row = self._active[index]
        if finish in ("stop", "length"):
            ids = numpy.asarray(row.ids[:-1], numpy.int32)
            kv = self._rows.read(index, 0, row.tail)
            self._store.park(row.key, Parked(ids, len(row.call.prompt), row.trunk, kv))
        last = self._active.pop()
        if last is not row:
            self._rows.move(len(self._active), index, last.tail)
            self._active[index] = last
        self._end(row.call, finish)

    def _abort_active(self, finish: Finish = "abort") -> None:
        active, self._active = self._active, []
        for row in active:
            self._end(row.call, finish)

    def _end(self, call: Call, finish: Finish) -> None:
        call.finish = finish
        call.done(call)
