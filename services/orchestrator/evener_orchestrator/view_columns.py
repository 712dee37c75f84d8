"""What each column of a view says, for people who ask in SQL: one meaning for a name, and a view's own where it differs.

`ledger.migrate` stores them in the database where it can.
"""

COLUMNS = {
    "arguments": "what the policy wrote, as JSON text",
    "attempt": "number of the last attempt: 1, 2, ...",
    "attempt_id": "the attempt, which is the proxy's session",
    "budget_tokens": "sampled tokens that the run file allows a rollout",
    "call_class": "agent, side, superseded or undelivered",
    "call_id": "the model call",
    "calls": "model calls of the last attempt",
    "cause": "name of the fault; null where there was none",
    "created_at": "when the rollout was planned",
    "ended_at": "when its outcome was recorded; null while it has none",
    "family": "metadata.category of the task",
    "fork_from": "the call that it is compared with; null where no call was before it",
    "group_id": "the group: one task under one harness",
    "group_state": "of the group: open, closed, training, trained, skipped or rejected",
    "groups": "how many groups the step trained",
    "harness": "name of the coding agent",
    "high": "upper end of Wilson's 95 % interval of pass_at_1",
    "kind": "prompt, sampled (trained here) or context (sampled, but not trained here)",
    "latest_rollout": "id of the newest of them",
    "logprob": "log-probability with which the engine sampled it; null where kind is not sampled",
    "logs": "digest of what the agent wrote to its standard streams, in the blob area logs",
    "low": "lower end of Wilson's 95 % interval of pass_at_1",
    "n": "rollouts that were scored",
    "now": "its own text around the difference, or its token ids where all messages say the same",
    "number": "of the call within its attempt: 1, 2, ...",
    "outcome": "finished, budget, agent_error, task_error, infra_error or cancelled; null while there is none",
    "parent_id": "the call whose prompt and completion is the longest token prefix of this prompt",
    "pass_at_1": "share of n that was solved",
    "position": "of the token within its training row: 0, 1, ...",
    "profile": "how the harness was started",
    "purpose": "train or eval",
    "reason": "why the group was skipped or rejected",
    "reward": "what training used: the score and its brevity bonus",
    "reward_mean": "mean reward of the scored rollouts",
    "reward_range": "greatest less smallest reward; 0 teaches nothing",
    "rollout_id": "the rollout",
    "rollouts": "how many rollouts",
    "run": "name of the run; a name may have several runs",
    "run_id": "the run",
    "sampled_tokens": "tokens that the policy sampled in the last attempt",
    "score": "the task's own reward in [0, 1]; null where it was not scored",
    "scored": "how many of its rollouts were scored",
    "seconds": "how long the step took",
    "sequence": "number of the training row within its attempt: 0, 1, ...",
    "sequence_id": "the training row",
    "sequences": "how many training rows the last attempt makes",
    "snapshot": "digest of the workspace that was left, in the blob area snapshots",
    "solved": "1 where the score is 1, else 0; null where it was not scored",
    "staleness": "the learner's version less the oldest that sampled a trained token",
    "staleness_max": "staleness of the oldest of its groups",
    "staleness_mean": "mean staleness of its groups",
    "state": "of the group: open, closed, training, trained, skipped or rejected",
    "step": "the optimizer step that trained the group; null where none did",
    "task_id": "the task's directory name",
    "token_id": "in the policy's vocabulary",
    "tool": "name of the tool that was called",
    "tool_calls": "tools that the calls of the last attempt called",
    "trained_tokens": "tokens of those rows that are trained",
    "version": "policy version: the one that was pinned, else the oldest that sampled a token",
    "version_max": "the newest policy version that sampled a token",
    "version_min": "the oldest policy version that sampled a token",
    "was": "the text of fork_from around the difference, or its token ids",
}
"""A column by its name, in whichever view."""

OWN: dict[str, dict[str, str]] = {
    "harness_matrix": {"solved": "how many of them have a score of 1"},
    "family_matrix": {"solved": "how many of them have a score of 1"},
    "group_signal": {"solved": "share of the scored rollouts whose score is 1"},
    "reward_curve": {
        "step": "1, 2, ...",
        "version": "the policy version that the step made",
        "rollouts": "how many scored rollouts the step trained",
        "reward": "mean reward of those rollouts",
        "score": "mean score of those rollouts",
        "solved": "share of those rollouts whose score is 1",
    },
    "staleness": {"step": "1, 2, ...", "version": "the policy version that the step made"},
    "fork_causes": {
        "cause": "template, retokenised, history_edited, thinking_dropped, compaction, subagent, retry or unknown",
        "position": "of the first token that differs from those of fork_from",
    },
    "tokens": {"version": "the policy version that sampled it; null where kind is not sampled"},
}
"""What a view says differently."""


def column_comment(view: str, column: str) -> str:
    """What ``column`` of ``view`` is. Raises KeyError for one that nobody described."""
    return OWN.get(view, {}).get(column) or COLUMNS[column]
