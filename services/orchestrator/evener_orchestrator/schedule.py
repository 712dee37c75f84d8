"""Which task and which harness the n-th training group of a run gets is a function of its number and the run's seed alone.

So a planner that restarts goes on where it was, and several planners agree. Called by the planner.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from evener.runfile import Harness

T = TypeVar("T")


def pick(number: int, *, seed: int, tasks: Sequence[T], harnesses: Sequence[Harness]) -> tuple[T, Harness]:
    """The task and harness of group ``number`` (0, 1, ...): each epoch is a new shuffle of all tasks, without replacement."""
    epoch, index = divmod(number, len(tasks))
    order = Random(f"tasks:{seed}:{epoch}").sample(range(len(tasks)), len(tasks))  # noqa: S311 - not a secret
    draw = Random(f"harness:{seed}:{number}")  # noqa: S311 - not a secret
    harness = draw.choices(harnesses, weights=[harness.weight for harness in harnesses])[0]
    return tasks[order[index]], harness
