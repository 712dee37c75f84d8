"""Each harness goes through the tasks pass after pass, each in a new order; a task that taught nothing sits the next one out.

A group whose rewards are all equal teaches nothing. A policy that learns solves ever more tasks whole, and one that is behind
fails ever the same: without the rest most rollouts of a late step are spent on them. Two things keep a policy from giving up
an answer before it was ever rewarded, after which it would never be tried again. Neighbours in a task folder tend to be alike,
so that an order spreads them. And a task that was failed whole is tried once more soon, before what others teach has crowded
its answer out. Which task is next depends on what the ledger holds alone, so that a planner that restarts goes on where it
was, and several planners agree. Called by the planner.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from random import Random

from evener.runfile import Harness

SECOND_CHANCES = 1
"""Groups of a task that may be failed whole before it is taken for one that the policy cannot do yet."""


def pick_harness(number: int, *, seed: int, harnesses: Sequence[Harness]) -> Harness:
    """The harness of training group ``number`` (0, 1, ...) of a run, by weight."""
    draw = Random(f"harness:{seed}:{number}")  # noqa: S311 - not a secret
    return draw.choices(harnesses, weights=[harness.weight for harness in harnesses])[0]


def turns_of(*, groups: int, skipped: int, failed: int) -> int:
    """The turns that a task has had under a harness: one a group, and one more for each that was skipped.

    ``failed``: those of the skipped that no rollout solved; the first `SECOND_CHANCES` of them count nothing.
    """
    return groups + skipped - 2 * min(failed, SECOND_CHANCES)


def pick_task(turns: Sequence[int], *, seed: int) -> int:
    """The index of the next task: of those with the fewest turns, the first in the order of that pass.

    ``turns``: by task, as `turns_of` counts them.
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
