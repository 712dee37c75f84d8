from dataclasses import dataclass

import pytest

from evener.errors import CAUSES, InfraError, InputError, Outcome, TaskError
from evener.messages import Sealed
from evener_runner.outcome import Ending, classify


@dataclass
class State:
    calls: int = 0
    in_flight: int = 0
    engine_failures: int = 0
    budget_spent: str | None = None
    fault: str | None = None
    last_error: str | None = None
    sealed: Sealed | None = None


def session(committed=2, lost=0, **state):
    return State(sealed=Sealed(committed=committed, aborted=0, lost=lost, undelivered=0), **state)


def ending(state=None, exit_code=0, **more):
    return Ending(exit_code=exit_code, state=state or session(), **more)


CONTEXT = {"fault": "budget_context", "last_error": "context length exceeded"}
ENGINE = {"fault": "engine_error", "last_error": "500", "engine_failures": 1}
TABLE = [
    # what happened, the outcome, its cause
    (ending(), "finished", None),
    (ending(session(lost=1)), "finished", None),
    (ending(exit_code=1), "agent_error", "agent_exit"),
    (ending(session(committed=0)), "infra_error", "agent_no_call"),
    (ending(session(committed=0), exit_code=139), "infra_error", "agent_no_call"),
    (ending(earlier_calls=2), "infra_error", "agent_no_call"),  # it did a step, and did not begin the next
    (ending(earlier_calls=1), "finished", None),
    (ending(session(fault="request_invalid", last_error="no such model")), "agent_error", "agent_exit"),
    (ending(session(budget_spent="calls"), exit_code=1), "budget", "budget_calls"),
    (ending(session(budget_spent="tokens")), "budget", "budget_tokens"),
    (ending(session(budget_spent="context", **CONTEXT)), "budget", "budget_context"),  # pi exits with 0
    (ending(session(budget_spent="wall"), exit_code=137, timed_out=True), "budget", "budget_wall"),
    (ending(exit_code=137, timed_out=True), "budget", "budget_wall"),
    (ending(session(committed=0), exit_code=137, timed_out=True), "budget", "budget_wall"),
    (ending(session(lost=1), exit_code=1), "infra_error", "calls_lost"),
    (ending(session(lost=1), exit_code=137, timed_out=True), "infra_error", "calls_lost"),
    (ending(exit_code=1, proxy_lost=True), "infra_error", "proxy_unavailable"),
    (ending(session(committed=0), exit_code=1, proxy_lost=True), "infra_error", "proxy_unavailable"),
    (ending(proxy_lost=True), "finished", None),  # it ended well all the same
    (ending(exit_code=1, problem="redis: no answer"), "infra_error", "proxy_unavailable"),
    (ending(session(budget_spent="calls"), exit_code=1, problem="redis: no answer"), "budget", "budget_calls"),
    (ending(problem="redis: no answer"), "finished", None),
    (ending(session(**ENGINE)), "infra_error", "engine_error"),
    (ending(session(**ENGINE), exit_code=1), "infra_error", "engine_error"),
    (ending(session(**ENGINE), exit_code=137, timed_out=True), "infra_error", "engine_error"),
    (ending(session(engine_failures=3)), "finished", None),  # it was tried again with success
    (ending(session(committed=0, engine_failures=3), exit_code=1), "infra_error", "engine_unavailable"),
    (Ending(error=TaskError("task_setup", "RUN")), "task_error", "task_setup"),
    (Ending(error=InfraError("session_lost", "x")), "infra_error", "session_lost"),
    (Ending(error=InputError("sandbox_refused", "x")), "infra_error", "sandbox_refused"),
    (Ending(stopped="cancel"), "cancelled", None),
    (Ending(stopped="pause"), "cancelled", None),
    (Ending(stopped="service"), "infra_error", "service_stopped"),
    (ending(stopped="service"), "infra_error", "service_stopped"),
]


@pytest.mark.parametrize(("what", "outcome", "cause"), TABLE)
def test_outcome(what, outcome, cause):
    verdict = classify(what)
    assert (verdict.outcome, verdict.cause) == (outcome, cause)
    assert cause is None or cause in CAUSES


def test_only_the_agents_own_endings_are_scored():
    scored = {classify(what).outcome for what, *_ in TABLE if classify(what).scored}
    assert scored == {Outcome.FINISHED, Outcome.BUDGET, Outcome.AGENT_ERROR}
