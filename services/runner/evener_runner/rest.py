"""A host that fails attempt after attempt rests in between, longer each time, until one ends otherwise.

It has free slots whenever its attempts fail at once, and would take every command there is. Used by the runner.
"""

import asyncio
import time

HERE = frozenset({"blob_refused", "blob_missing", "sandbox_failed", "snapshot_failed", "harness_missing", "internal"})
"""Causes that the next attempt on this host would meet as well."""

FIRST_S = 1.0
LONGEST_S = 60.0


class Rest:
    """When the next command may be taken."""

    def __init__(self) -> None:
        self._faults = 0
        self._until = 0.0

    @property
    def left_s(self) -> float:
        """Seconds left of a rest; 0 or less where there is none."""
        return self._until - time.monotonic()

    def note(self, cause: str | None) -> None:
        """An attempt ended by ``cause`` (None: well)."""
        if cause not in HERE:
            self._faults = 0
            return
        self._until = time.monotonic() + min(FIRST_S * 2**self._faults, LONGEST_S)
        self._faults += 1

    async def over(self) -> None:
        """Wait for the end of a rest as it is known now."""
        await asyncio.sleep(max(0.0, self.left_s))
