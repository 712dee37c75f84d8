"""The scores of a task's steps become those of the rollout as the Harbor format has it; a task without steps is one step.

Only steps that are reached count: the first that falls short of its ``min_reward`` is the last. Called by the verifier.
"""

from collections.abc import Sequence
from math import inf
from statistics import fmean

from evener.tasks import Step, Strategy

Scores = dict[str, float]


def suffices(step: Step, scores: Scores) -> bool:
    """Whether the step's scores, in [0, 1], reach its ``min_reward``, which is in the ranges that the task declares."""
    for name, least in step.min_reward.items():
        low, high = step.toml.verifier.ranges.get(name, (0.0, 1.0))
        if not scores.get(name, -inf) >= (least - low) / (high - low):
            return False
    return True


def rolled_up(scores: Sequence[Scores], strategy: Strategy) -> Scores:
    """The scores of the steps that were reached as the rollout's: the last, or the mean by name, 0 where one lacks it."""
    if strategy == "final":
        return dict(scores[-1])
    names = dict.fromkeys(name for each in scores for name in each)
    return {name: fmean(each.get(name, 0.0) for each in scores) for name in names}
