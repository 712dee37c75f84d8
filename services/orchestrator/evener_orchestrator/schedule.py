"""Each harness goes through the tasks pass after pass, each in a new order; a task that taught nothing sits the next one out.

A group whose rewards are all equal teaches nothing. A policy that learns solves ever more tasks whole, and one that is behind
fails ever the same: without the rest most rollouts of a late step are spent on them. Neighbours in a task folder tend to be
alike, so that an order spreads them: where a plain shuffle draws five tasks with one answer in a row, a policy learns that
answer and never tries another. Which task is next depends on what the ledger holds alone, so that a planner that restarts goes
on where it was, and several planners agree. Called by the planner.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from random import Random

from evener.runfile import Harness


def pick_harness(number: int, *, seed: int, harnesses: Sequence[Harness]) -> Harness:
    """The harness of training group ``number`` (0, 1, ...) of a run, by weight."""
    draw = Random(f"harness:{seed}:{number}")  # noqa: S311 - not a secret
    return draw.choices(harnesses, weights=[harness.weight for harness in harnesses])[0]


def pick_task(turns: Sequence[int], *, seed: int) -> int:
    """The index of the next task: of those with the fewest turns, the first in the order of that pass.

    ``turns``: by task, its groups under the harness, and those that were skipped once more.
    """
    fewest = min(turns)
    return next(index for index in _order(f"tasks:{seed}:{fewest}", len(turns)) if turns[index] == fewest)


@lru_cache(maxsize=8)
def _order(seed: str, size: int) -> list[int]:
    return _spread(Random(seed), range(size))  # noqa: S311 - not a secret


def _spread(random: Random, items: Sequence[int]) -> list[int]:
    """``items`` in a random order whose every stretch has its share of each half, quarter, eighth ... of them."""
    if len(items) < 2:
        return list(items)
    half = (len(items) + random.randrange(2)) // 2
    first, second = _spread(random, items[:half]), _spread(random, items[half:])
    order: list[int] = []
    for pair in zip_longest(first, second):
        order += random.sample([item for item in pair if item is not None], k=2 - pair.count(None))
    return order
