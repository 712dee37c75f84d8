"""Every fault has one boundary, one cause and one remedy, and the boundary decides what happens to the rollout.

The table `CAUSES` is the only list of causes; the ledger stores a cause's name, the screens print its remedy. A fault of
ours is never a reward of 0: only `Boundary.AGENT` may be scored.
"""

from dataclasses import dataclass
from enum import StrEnum


class Boundary(StrEnum):
    """Whose fault it is."""

    INPUT = "input"  # the user's: exit code 2, nothing was started
    AGENT = "agent"  # the agent's: scored
    TASK = "task"  # the task author's: the group is rejected, no retry
    INFRA = "infra"  # ours: retried, then reported


class Outcome(StrEnum):
    """Why an attempt ended; a rollout's outcome is its last attempt's."""

    FINISHED = "finished"
    BUDGET = "budget"
    AGENT_ERROR = "agent_error"
    TASK_ERROR = "task_error"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Cause:
    """One row of the table: what happened, whose fault it is, and what to do."""

    boundary: Boundary
    text: str
    remedy: str


CAUSES: dict[str, Cause] = {
    # input
    "task_invalid": Cause(Boundary.INPUT, "a task directory is malformed", "mend the named file and field"),
    "run_file_invalid": Cause(Boundary.INPUT, "the run file is malformed", "mend the named key"),
    "policy_invalid": Cause(
        Boundary.INPUT,
        "the policy folder is incomplete",
        "give a folder with config.json, model.safetensors and a tokenizer with a chat template",
    ),
    "harness_unknown": Cause(Boundary.INPUT, "no such harness", "run `evener harnesses ls`"),
    "settings_invalid": Cause(Boundary.INPUT, "a setting is malformed", "mend the named EVENER_* variable"),
    "request_invalid": Cause(Boundary.INPUT, "the API refused the request", "mend what the message names"),
    "bus_embedded": Cause(
        Boundary.INPUT,
        "an embedded bus lives only inside the running stack",
        "set EVENER_AMQP_URL to the broker's URL; the embedded stack issues again by itself what had no effect",
    ),
    "query_invalid": Cause(Boundary.INPUT, "the database refused the query", "see docs/sql.md for tables and views"),
    "not_verifiable": Cause(
        Boundary.INPUT, "the rollout cannot be scored again", "name an engine that serves its version, or another rollout"
    ),
    "not_found": Cause(Boundary.INPUT, "no such object", "list what there is with `ls`"),
    "port_occupied": Cause(Boundary.INPUT, "another program listens on the port", "stop it, or set the port's EVENER_*_PORT"),
    "folder_in_use": Cause(Boundary.INPUT, "another evener runs in this folder", "wait for it, stop it, or set EVENER_DATA"),
    "stack_in_use": Cause(
        Boundary.INPUT,
        "the engines of this stack serve another run's policy",
        "wait for it, or `evener runs pause` or `cancel` it",
    ),
    "redis_unsafe": Cause(
        Boundary.INPUT,
        "this Redis may lose what the proxy captured",
        "set `maxmemory-policy noeviction` and `appendonly yes` in redis.conf",
    ),
    "sandbox_refused": Cause(
        Boundary.INPUT,
        "this sandbox does not contain tasks that are not your own",
        "install bubblewrap, or use docker",
    ),
    # agent
    "agent_exit": Cause(Boundary.AGENT, "the agent stopped with an error", "see `evener rollouts show ID --logs`"),
    "budget_calls": Cause(Boundary.AGENT, "the budget of calls is spent", "raise [budget] calls"),
    "budget_tokens": Cause(Boundary.AGENT, "the budget of sampled tokens is spent", "raise [budget] sampled_tokens"),
    "budget_context": Cause(Boundary.AGENT, "the context window is full", "raise [budget] context_tokens"),
    "budget_wall": Cause(Boundary.AGENT, "the time is spent", "raise [budget] wall_s"),
    # task
    "reward_missing": Cause(Boundary.TASK, "the tests wrote no reward", "let tests/test.sh write /logs/verifier/reward.txt"),
    "reward_invalid": Cause(Boundary.TASK, "the reward is not a finite number in its range", "mend what tests/test.sh writes"),
    "baseline_passes": Cause(
        Boundary.TASK, "the tests pass before an agent did anything", "mend tests/ so that the untouched workspace fails"
    ),
    "task_setup": Cause(Boundary.TASK, "the task's environment cannot be made", "mend environment/"),
    # infra
    "agent_no_call": Cause(
        Boundary.INFRA,
        "the agent ended without a model call, so that the policy had no part in it",
        "see `evener rollouts show ID --logs`",
    ),
    "api_unavailable": Cause(Boundary.INFRA, "the orchestrator does not answer", "is `evener up` running?"),
    "api_refused": Cause(Boundary.INFRA, "the orchestrator refused our token", "set EVENER_API_TOKEN"),
    "bus_unavailable": Cause(Boundary.INFRA, "the message broker does not answer", "is RabbitMQ up? see EVENER_AMQP_URL"),
    "bus_refused": Cause(
        Boundary.INFRA, "the message broker refused", "look at RabbitMQ's log, its policies and the user's permissions"
    ),
    "engine_unavailable": Cause(Boundary.INFRA, "the engine does not answer", "see the engine's log; `evener doctor`"),
    "engine_error": Cause(Boundary.INFRA, "the engine failed on a call", "see the engine's log"),
    "engine_level": Cause(
        Boundary.INFRA,
        "the engine returns no token ids or log-probabilities",
        "start vLLM with --logprobs-mode processed_logprobs and a version that knows return_token_ids",
    ),
    "proxy_unavailable": Cause(Boundary.INFRA, "the proxy does not answer", "see the proxy's log; `evener doctor`"),
    "proxy_refused": Cause(Boundary.INFRA, "the proxy's admin side refused us", "set EVENER_ADMIN_TOKEN alike everywhere"),
    "lease_expired": Cause(Boundary.INFRA, "the runner fell silent", "look for a dead runner; it is tried again"),
    "calls_lost": Cause(Boundary.INFRA, "a proxy died with calls in flight", "it is tried again"),
    "capture_gap": Cause(Boundary.INFRA, "the archived calls are not those that were sealed", "look at Redis's log"),
    "capture_unavailable": Cause(
        Boundary.INFRA, "a call could not be captured", "look at Redis: is it up, has it memory? `evener doctor`"
    ),
    "session_lost": Cause(Boundary.INFRA, "the proxy has forgotten the session", "look at Redis's log"),
    "sandbox_failed": Cause(Boundary.INFRA, "the sandbox could not be made", "run `evener doctor`"),
    "snapshot_failed": Cause(Boundary.INFRA, "the workspace could not be archived", "look at the disk's free space"),
    "verifier_failed": Cause(Boundary.INFRA, "the verifier failed", "see the verifier's log; it is tried again"),
    "harness_missing": Cause(Boundary.INFRA, "the harness is not installed", "run `evener harnesses install NAME`"),
    "version_changed": Cause(Boundary.INFRA, "the weights changed during an evaluation", "it is tried again"),
    "blob_missing": Cause(Boundary.INFRA, "a blob is gone", "restore the blob store"),
    "blob_refused": Cause(
        Boundary.INFRA, "the blob store takes or gives nothing", "free its disk, or mend its permissions; see EVENER_BLOBS_URL"
    ),
    "service_stopped": Cause(Boundary.INFRA, "a service was stopped", "it is tried again at the next start"),
    "internal": Cause(Boundary.INFRA, "a fault of Evener", "report it with the log"),
}


class EvenerError(Exception):
    """A fault whose cause is in the table. ``str()`` is one line: what, where, what to do."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = cause
        self.detail = detail
        self.boundary = CAUSES[cause].boundary
        super().__init__(f"{CAUSES[cause].text}: {detail} ({CAUSES[cause].remedy})")

    @property
    def exit_code(self) -> int:
        """2 for bad input, 1 for a failure."""
        return 2 if self.boundary is Boundary.INPUT else 1


class InputError(EvenerError):
    """Bad input of the user: nothing was started, nothing was written."""


class InfraError(EvenerError):
    """A fault of ours: retried or reported, never a grade."""


class TaskError(EvenerError):
    """A fault of the task's author: not retried."""
