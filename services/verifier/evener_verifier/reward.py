"""What the tests wrote is a reward only if it is a finite number in [0, 1]; everything else is the task author's fault.

``reward.json`` (a flat object of numbers; ``reward`` is the reward, the others are named scores) outranks ``reward.txt`` (one
number), as in the Harbor format. The exit code of the tests is ignored. Called by the verifier.
"""

import math

import msgspec

from evener.errors import TaskError

LIMIT = 64 << 10
"""Bytes read of a reward file: far more than any honest one has."""


def parse(json: bytes | None, text: bytes | None) -> dict[str, float]:
    """The scores by name. Raises TaskError ``reward_missing`` or ``reward_invalid``."""
    if json is not None:
        return _from_json(json)
    if text is None:
        raise TaskError("reward_missing", "neither /logs/verifier/reward.json nor reward.txt was written")
    try:
        value = float(text)
    except ValueError as error:
        raise TaskError("reward_invalid", f"reward.txt: {_shown(text)} is not a number") from error
    return {"reward": _checked("reward.txt", value)}


def _from_json(content: bytes) -> dict[str, float]:
    try:
        scores = msgspec.json.decode(content, type=dict[str, int | float])
    except msgspec.DecodeError as error:
        raise TaskError("reward_invalid", f"reward.json: {_shown(content)}: {error}") from error
    if "reward" not in scores:
        raise TaskError("reward_missing", f"reward.json has no key 'reward': {_shown(content)}")
    return {name: _checked(f"reward.json: {name}", value) for name, value in scores.items()}


def _checked(name: str, value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise TaskError("reward_invalid", f"{name}: {value!r} is not in [0, 1]")
    return float(value)


def _shown(content: bytes) -> str:
    return repr(content[:80].decode(errors="replace"))
