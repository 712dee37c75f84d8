"""A step is exactly ``groups_per_step`` whole admitted groups, the oldest first; a group is in one step at most.

`Assembly` holds the groups that were claimed and not yet trained. It refuses a group as soon as its fate is sealed, so that
the planner's credit comes back at once. It does no input or output. Called by `evener_learner.campaign`.
"""

from dataclasses import dataclass

import numpy as np

from evener.api import GroupOrder
from evener_learner.admission import Group, Refusal, Row, admit, judge_versions


@dataclass(frozen=True, slots=True)
class Step:
    """The groups of one optimizer step, and the version of the weights that will train them."""

    version: int
    groups: list[Group]

    @property
    def rows(self) -> list[Row]:
        """Every row of every group."""
        return [row for group in self.groups for row in group.rows]

    def metrics(self) -> dict[str, float]:
        """What is known before training: reward over rollouts, staleness over groups, counts of rows and tokens."""
        rewards = np.asarray([reward for group in self.groups for reward in group.rewards])
        staleness = [self.version - min(group.versions) for group in self.groups]
        rows = self.rows
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": float(max(staleness)),
            "groups": float(len(self.groups)),
            "rollouts": float(rewards.size),
            "rows": float(len(rows)),
            "trained_tokens": float(sum(int(row.mask.sum()) for row in rows)),
            "row_tokens": float(sum(row.ids.size for row in rows)),
        }


class Assembly:
    """Claimed groups on their way to a step."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, vocabulary: int, temperature: float) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._waiting: list[Group] = []
        self._groups_seen: set[str] = set()
        self._rollouts: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def knows(self, group_id: str) -> bool:
        """Whether the group was added before, whatever became of it: a command that comes again changes nothing."""
        return group_id in self._groups_seen

    def add(self, order: GroupOrder) -> Refusal | None:
        """Admit a claimed group, or say why not. A group that `knows` must not be added again."""
        assert not self.knows(order.group_id), f"group {order.group_id} was added before"
        self._groups_seen.add(order.group_id)
        verdict = admit(order, vocabulary=self._vocabulary, temperature=self._temperature, trained=self._rollouts)
        if isinstance(verdict, Refusal):
            return verdict
        self._rollouts.update(verdict.rollout_ids)
        self._waiting.append(verdict)
        return None

    def sweep(self, version: int, published: set[int]) -> list[Refusal]:
        """Remove and return the groups that the weights of ``version`` must not train."""
        refusals: list[Refusal] = []
        kept: list[Group] = []
        for group in self._waiting:
            refusal = judge_versions(group, version=version, published=published, max_staleness=self._max_staleness)
            if refusal is None:
                kept.append(group)
            else:
                refusals.append(refusal)
        self._waiting = kept
        return refusals

    def take(self, version: int) -> Step | None:
        """The next step for the weights of ``version``, if there are enough groups; call `sweep` just before."""
        if len(self._waiting) < self._groups_per_step:
            return None
        chosen, self._waiting = self._waiting[: self._groups_per_step], self._waiting[self._groups_per_step :]
        return Step(version, chosen)
