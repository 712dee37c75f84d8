"""The advantage of a rollout compares it with its own group alone, and every sequence of a rollout carries the rollout's.

Called by `evener_learner.admission`.
"""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-8


def advantages(rewards: Sequence[float]) -> list[float]:
    """``(reward - mean) / (std + 1e-8)`` over the rollouts of one group, with the population's standard deviation.

    GRPO's advantage (Shao et al., DeepSeekMath, 2024, section 4.1).
    """
    values = np.asarray(rewards, np.float64)
    return ((values - values.mean()) / (values.std() + EPSILON)).tolist()
