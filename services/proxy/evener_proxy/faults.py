"""What an agent is told when a call ends without a sample, and what its session keeps of it: the one place that says so.

A failure of ours is 503, and an engine that stays too busy 429: agents ask again after both. What is wrong with the request is
400, or 413. A session that ends is never an error, but a last reply (`budget`). The cause is a row of `evener.errors.CAUSES`.
Used by the calls.
"""

from evener.engines.sampler import EngineRefused
from evener.trace.store import Refused
from evener_proxy.budget import Spent
from evener_proxy.canonical import CallError
from evener_proxy.sessions import sealed_session, unknown_key


class Fault(Exception):
    """A call that ends without a sample: what the agent is told, and what the session keeps of it (cause and detail)."""

    def __init__(self, error: CallError, *, cause: str = "", detail: str = "") -> None:
        self.error = error
        self.cause = cause
        self.detail = detail
        super().__init__(str(error))


def engine_fault(cause: str, detail: str, *, busy: bool = False) -> Fault:
    """The engine failed, or is ``busy``. The detail names hosts, which are not the agent's business."""
    error = CallError(503, cause, f"the inference engine failed ({cause})", retry_after=5)
    if busy:
        error = CallError(429, "rate_limit_exceeded", "the inference engine takes no more requests now", retry_after=5)
    return Fault(error, cause=cause, detail=detail)


def request_fault(error: EngineRefused) -> Fault | Spent:
    """The engine found the request wrong: the agent's fault only where it is about what the agent sent."""
    if error.context_full:
        return Spent("context")
    if error.status in (400, 413, 422):
        message = error.message if error.told else "the inference engine refused the request"
        status, code = (413, "request_too_large") if error.status == 413 else (400, "invalid_request")
        return Fault(CallError(status, code, message, param=error.param), detail=error.message)
    return engine_fault("engine_error", str(error))


def refusal(refused: Refused) -> Fault | Spent:
    """The store does not take the call."""
    if refused.reason == "gone":
        return Fault(unknown_key())
    if refused.reason == "sealed":
        return Fault(sealed_session())
    if refused.reason == "lost":  # the attempt is void (its fault is `session_lost`): its agent is not kept waiting
        return Fault(CallError(403, "session_lost", "calls of this session may have been lost; no further call is answered"))
    if refused.reason in ("released", "busy"):  # this replica was silent for longer than its lease, and another gave it up
        return uncaptured("the call was given up by another replica")
    return Spent(refused.reason)


def uncaptured(detail: str) -> Fault:
    """What cannot be captured is not delivered; an agent that ends over it is not graded."""
    error = CallError(503, "capture_unavailable", "the capture store does not answer", retry_after=5)
    return Fault(error, cause=error.code, detail=detail)
