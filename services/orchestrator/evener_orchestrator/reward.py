"""A reward is the score, made 0 where the agent did not finish, plus a little for fewer calls on solved tasks.

The score itself is kept as the verifier measured it. Called when a score is recorded.
"""

from evener.errors import Outcome


def reward(*, score: float, outcome: Outcome, calls: int, budget_calls: int, brevity: float) -> float:
    """What the learner trains on, in [0, 1 + brevity].

    ``calls`` committed calls out of ``budget_calls`` allowed; the bonus falls linearly from ``brevity`` for one call to 0 for
    the whole budget.
    """
    if outcome is not Outcome.FINISHED:
        return 0.0
    if score < 1.0 or brevity == 0.0:
        return score
    spent = (calls - 1) / (budget_calls - 1) if budget_calls > 1 else 0.0
    return score + brevity * (1.0 - min(max(spent, 0.0), 1.0))
