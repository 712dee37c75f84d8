"""What was computed once is not computed again. Invariant: keys and values found for ids belong to exactly those ids.

Two kinds of prefix are kept. A *trunk* is shared by running rows; it starts as the whole of the first prompt seen,
and shrinks or is extended to what later prompts have in common (system prompt and tools, for agents). A *parked tail*
is what one call computed behind its trunk; the session's next call, or another rollout of the task, starts from a copy.
Everything here is for one set of weights; the scheduler drops it when they change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy
    from numpy.typing import NDArray
    from torch import Tensor

    from .model import Trunk

TRUNK_MIN = 64  # tokens; below this, sharing costs more than it saves
GROW_MIN = 256  # tokens two prompts must share behind their trunk to get a longer one
MAX_TRUNKS = 8
MAX_PARKED_BYTES = 256 << 20


@dataclass(eq=False)
class Parked:
    """Ids from position 0, the first `prompt` of them a call's prompt; keys and values of those behind the trunk."""

    ids: NDArray[numpy.int32]
    prompt: int
    trunk: Trunk | None
    kv: Tensor

    @property
    def size(self) -> int:
        """Bytes held."""
        return self.kv.nbytes


def common(a: NDArray[numpy.int32], b: NDArray[numpy.int32]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def rebase(tail: Tensor, old: Trunk | None, new: Trunk) -> Tensor:
    """The tail behind `old` as a tail behind `new`, of which one is a prefix of the other."""
    have = old.length if old else 0
    if new.length >= have:
        return tail[:, :, :, new.length - have :].clone()
    assert old is not None
    return torch.cat((old.kv[:, :, :, new.length :], tail), 3)


class PrefixStore:
    """Trunks and parked tails, both forgotten least recently used first.

    `on_rebase(old, new)` is called when rows behind `old` whose ids start with `new` should move behind it.
    """

    def __init__(self, on_rebase: Callable[[Trunk, Trunk], None]) -> None:
        self._on_rebase = on_rebase
        self._trunks: list[Trunk] = []
        self._parked: OrderedDict[int, Parked] = OrderedDict()
        self._bytes = 0
        self._clock = 0
        self._cleared = 0

    def clear(self) -> list[Trunk]:
        """Forget everything; the trunks that were used since it was last called."""
        recent = [trunk for trunk in self._trunks if trunk.used > self._cleared]
        self._cleared = self._clock
        self._trunks.clear()
        self._parked.clear()
        self._bytes = 0
        return recent

    def match(self, ids: NDArray[numpy.int32]) -> tuple[Trunk | None, Tensor | None]:
        """The trunk `ids` start with, and keys and values of as much behind it as is known (None: nothing).

        At least the last id is left to compute.
        """
        limit = ids[:-1]
        trunk = self._trunk(limit)
        parked, length = self._best(limit, trunk)
        if parked is None:
            return self._touch(trunk), None
        base = trunk.length if trunk else 0
        if trunk is not None and length - base >= GROW_MIN and length < parked.prompt:
            # Both prompts go on after the trunk: this is sharing, not one session that grows.
            trunk, base = self._grow(trunk, parked, length), length
        return self._touch(trunk), parked.kv[:, :, :, : length - base] if length > base else None

    def _trunk(self, ids: NDArray[numpy.int32]) -> Trunk | None:
        shared = [(common(trunk.ids, ids), trunk) for trunk in self._trunks]
        full = max((t for n, t in shared if n == t.length), key=lambda t: t.length, default=None)
        worth = full.length + GROW_MIN if full else TRUNK_MIN
        partial = [(n, t) for n, t in shared if worth <= n < t.length <= 2 * n]
        if not partial:
            return full
        length, trunk = max(partial, key=lambda pair: pair[0])
        return self._shrink(trunk, length)

    def _touch(self, trunk: Trunk | None) -> Trunk | None:
        if trunk is not None:
            self._clock += 1
            trunk.used = self._clock
        return trunk

    def _best(self, ids: NDArray[numpy.int32], trunk: Trunk | None) -> tuple[Parked | None, int]:
        """The parked tail behind `trunk` with the longest common prefix, and its length."""
        best, best_key = trunk.length if trunk else 0, None
        start = best
        for key, parked in self._parked.items():
            if parked.trunk is trunk and (length := start + common(parked.ids[start:], ids[start:])) > best:
                best, best_key = length, key
        if best_key is None:
            return None, best
        self._parked.move_to_end(best_key)
        return self._parked[best_key], best

    def hold(self, trunk: Trunk) -> None:
        """Hold a trunk; the least recently used one makes room. Rows that use it keep it alive until they end."""
        if len(self._trunks) >= MAX_TRUNKS:
            self._drop(min(self._trunks, key=lambda t: t.used))
        self._trunks.append(trunk)
        self._touch(trunk)

    def park(self, key: int, parked: Parked) -> None:
        """Hold what call `key` computed, in place of what it parked before."""
        self._forget(key)
        self._parked[key] = parked
        self._bytes += parked.size
        while self._bytes > MAX_PARKED_BYTES:
            self._forget(next(iter(self._parked)))

    def _forget(self, key: int) -> None:
        if (parked := self._parked.pop(key, None)) is not None:
            self._bytes -= parked.size

    def _drop(self, trunk: Trunk) -> None:
        self._trunks = [t for t in self._trunks if t is not trunk]
        for key in [key for key, parked in self._parked.items() if parked.trunk is trunk]:
            self._forget(key)

    def _shrink(self, trunk: Trunk, length: int) -> Trunk:
        new = type(trunk)(trunk.ids[:length], trunk.kv[:, :, :, :length].clone(), trunk.used)
        self._trunks = [new if t is trunk else t for t in self._trunks]
        self._rebase(trunk, new)
        return new

    def _grow(self, trunk: Trunk, parked: Parked, length: int) -> Trunk:
        shared = parked.kv[:, :, :, : length - trunk.length]
        new = type(trunk)(parked.ids[:length], torch.cat((trunk.kv, shared), 3))
        self._rebase(trunk, new)
        self.hold(new)
        return new

    def _rebase(self, old: Trunk, new: Trunk) -> None:
        for parked in self._parked.values():
            if parked.trunk is old and common(parked.ids, new.ids) == new.length:
                self._bytes -= parked.size
                parked.trunk, parked.kv = new, rebase(parked.kv, old, new)
                self._bytes += parked.size
        self._on_rebase(old, new)
