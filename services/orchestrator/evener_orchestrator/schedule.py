"""Each harness goes through the tasks pass after pass, each a new shuffle; a task that taught nothing sits the next one out.

A group whose rewards are all equal teaches nothing. A policy that learns solves ever more tasks whole, and one that is behind
fails ever the same: without the rest most rollouts of a late step are spent on them. Which task is next depends on what the
ledger holds alone, so that a planner that restarts goes on where it was, and several planners agree. Called by the planner.
"""

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from evener.runfile import Harness


def pick_harness(number: int, *, seed: int, harnesses: Sequence[Harness]) -> Harness:
    """The harness of training group ``number`` (0, 1, ...) of a run, by weight."""
    draw = Random(f"harness:{seed}:{number}")  # noqa: S311 - not a secret
    return draw.choices(harnesses, weights=[harness.weight for harness in harnesses])[0]


def pick_task(turns: Sequence[int], *, seed: int) -> int:
    """The index of the next task: of those with the fewest turns, the first in the shuffle of that pass.

    ``turns``: by task, its groups under the harness, and those that were skipped once more.
    """
    fewest = min(turns)
    return next(index for index in _shuffle(f"tasks:{seed}:{fewest}", len(turns)) if turns[index] == fewest)


@lru_cache(maxsize=8)
def _shuffle(seed: str, size: int) -> list[int]:
    return Random(seed).sample(range(size), size)  # noqa: S311 - not a secret
