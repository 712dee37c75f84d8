"""The scores of one grading: what the tests wrote, but 0 where tampering was seen, and what the task says where time ran out.

Called by the verifier.
"""

import math

from evener.errors import TaskError
from evener.tasks import TaskToml
from evener_verifier import reward
from evener_verifier.findings import Finding
from evener_verifier.grader import Ran

_NOTHING = {"reward": 0.0}


def scores(ran: Ran, toml: TaskToml) -> dict[str, float]:
    """What the tests say. Raises TaskError ``reward_missing`` or ``reward_invalid``."""
    verifier = toml.verifier
    if ran.result.timed_out:
        if verifier.timeout_reward is not None:
            return {"reward": verifier.timeout_reward}
        if toml.verify is None:
            raise TaskError("reward_missing", f"tests/test.sh did not end within {verifier.timeout_sec:g} s")
    if toml.verify is not None:
        return {"reward": float(ran.result.exit_code == 0 and not ran.result.timed_out)}
    return reward.parse(ran.json, ran.text, verifier.ranges)


def findings(ran: Ran, toml: TaskToml) -> list[Finding]:
    """What the grader's sandbox showed of the candidate's code; judged before the reward, which it may have made unreadable."""
    if ran.canaries is None:
        return []
    if ran.result.timed_out or toml.verify is not None:  # what ran when time was over could not report
        failed = ran.result.timed_out or ran.result.exit_code != 0
    else:
        rewards = [content for content in (ran.json, ran.text) if content is not None]
        failed = bool(rewards) and not any(_claims(content) for content in rewards)
    found = ran.canaries.findings(claims=not failed, tests_write=ran.tests_write)
    if ran.closed:
        found.append(Finding("reward_closed", "/logs/verifier was closed to writers", tampering=True))
    return found


def judged(found: list[Finding]) -> dict[str, float] | None:
    """The scores that tampering leaves; None where there was none."""
    return dict(_NOTHING) if any(each.tampering for each in found) else None


def _claims(content: bytes) -> bool:
    """Whether a reward file asks for anything but 0."""
    try:
        return not float(content) <= 0 or math.isnan(float(content))
    except ValueError:
        return True
