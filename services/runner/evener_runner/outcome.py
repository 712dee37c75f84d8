"""The one place that says why an attempt ended; every rule is a row, and the first that holds decides.

An exit code alone lies: pi exits with 0 after a call that failed. So what the proxy saw of the session comes first, and a
fault of ours is found before anything is held against the agent. Called by the attempt when its session is sealed.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from evener.errors import CAUSES, Boundary, EvenerError, Outcome
from evener.messages import Sealed

Stop = Literal["cancel", "pause", "lost", "service"]
"""Why a runner ends an attempt before its time: two words of the ledger, a lost lease, a service that is stopped."""


class SessionState(Protocol):
    """What the proxy says of a session (`evener.trace.session.SessionState`)."""

    @property
    def calls(self) -> int:
        """Calls that were committed."""
        ...

    @property
    def in_flight(self) -> int:
        """Calls without an end."""
        ...

    @property
    def engine_failures(self) -> int:
        """Calls that an engine failed."""
        ...

    @property
    def budget_spent(self) -> str | None:
        """``calls``, ``tokens``, ``context`` or ``wall``."""
        ...

    @property
    def fault(self) -> str | None:
        """The cause of the last call's failure; None where the last call succeeded."""
        ...

    @property
    def last_error(self) -> str | None:
        """Its text."""
        ...

    @property
    def sealed(self) -> Sealed | None:
        """Counts of calls; set when sealed."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """All that is known when an attempt ended. ``error`` prevented the agent from running, or us from sealing; ``proxy_lost``:
    its last connection found no proxy; ``problem``: why no agent would have been answered when it ended by itself with an
    error; ``earlier_calls`` were committed before the agent was started the last time.
    """

    stopped: Stop | None = None
    error: EvenerError | None = None
    exit_code: int | None = None
    timed_out: bool = False
    proxy_lost: bool = False
    problem: str | None = None
    earlier_calls: int = 0
    state: SessionState | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, its cause (a row of `evener.errors.CAUSES`) and one line about it."""

    outcome: Outcome
    cause: str | None = None
    detail: str = ""

    @property
    def scored(self) -> bool:
        """Whether a verifier will look at the workspace."""
        return self.outcome in (Outcome.FINISHED, Outcome.BUDGET, Outcome.AGENT_ERROR)


def classify(ending: Ending) -> Verdict:
    """Why the attempt ended."""
    if ending.stopped in ("cancel", "pause"):
        return Verdict(Outcome.CANCELLED, None, f"the ledger said {ending.stopped}")
    if ending.stopped is not None:
        return Verdict(Outcome.INFRA_ERROR, "service_stopped", "the runner was stopped")
    if ending.error is not None:
        blamed = Outcome.TASK_ERROR if ending.error.boundary is Boundary.TASK else Outcome.INFRA_ERROR
        return Verdict(blamed, ending.error.cause, ending.error.detail)
    assert ending.state is not None, "an agent that ran has a session"
    return _of_session(ending, ending.state)


def went_well(exit_code: int, state: SessionState, earlier_calls: int) -> bool:
    """Whether an agent that exited did what it was started for, so that it may be started for the next step.

    After all else the attempt ends, and `classify` says why.
    """
    spoiled = (state.last_error, state.fault, state.budget_spent)
    return exit_code == 0 and not state.in_flight and spoiled == (None, None, None) and state.calls > earlier_calls


def _of_session(ending: Ending, state: SessionState) -> Verdict:
    sealed = state.sealed or Sealed(committed=0, aborted=0, lost=0, undelivered=0)
    abnormal = ending.timed_out or ending.exit_code != 0
    error = (state.last_error or "")[:500]
    if sealed.lost and abnormal:
        return Verdict(Outcome.INFRA_ERROR, "calls_lost", f"{sealed.lost} calls were lost")
    if ending.proxy_lost and abnormal:
        return Verdict(Outcome.INFRA_ERROR, "proxy_unavailable", "the agent could not reach the proxy")
    if state.budget_spent is not None:
        return Verdict(Outcome.BUDGET, f"budget_{state.budget_spent}", error)
    if state.fault in CAUSES and CAUSES[state.fault].boundary is Boundary.INFRA:
        return Verdict(Outcome.INFRA_ERROR, state.fault, error)
    if state.engine_failures and not sealed.committed:
        return Verdict(Outcome.INFRA_ERROR, "engine_unavailable", f"{state.engine_failures} calls failed, none succeeded")
    if ending.timed_out:
        return Verdict(Outcome.BUDGET, "budget_wall")
    if sealed.committed <= ending.earlier_calls:
        return Verdict(Outcome.INFRA_ERROR, "agent_no_call", f"exit code {ending.exit_code}")
    if ending.exit_code != 0 and ending.problem is not None:
        return Verdict(Outcome.INFRA_ERROR, "proxy_unavailable", ending.problem[:500])
    if ending.exit_code != 0:
        return Verdict(Outcome.AGENT_ERROR, "agent_exit", f"exit code {ending.exit_code}")
    if state.last_error is not None:
        return Verdict(Outcome.AGENT_ERROR, "agent_exit", f"exit code 0 after a call that failed: {error}")
    return Verdict(Outcome.FINISHED)
