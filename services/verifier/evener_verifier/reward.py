"""What the tests wrote is a reward only if it is finite and in its range; everything else is the task author's fault.

``reward.json`` (a flat object of numbers; ``reward`` is the reward, the others are named scores) outranks ``reward.txt`` (one
number), as in the Harbor format. The exit code of the tests is ignored. The range is [0, 1], or what ``[verifier] ranges``
says, which is mapped to [0, 1]. Called by the verifier.
"""

import math
from collections.abc import Mapping

import msgspec

from evener.errors import TaskError

LIMIT = 64 << 10
"""Bytes read of a reward file: far more than any honest one has."""
MAX_NAMES = 64
MAX_NAME = 64

Ranges = Mapping[str, tuple[float, float]]


def parse(json: bytes | None, text: bytes | None, ranges: Ranges) -> dict[str, float]:
    """The scores by name, in [0, 1]. Raises TaskError ``reward_missing`` or ``reward_invalid``."""
    if json is not None:
        return _from_json(json, ranges)
    if text is None:
        raise TaskError("reward_missing", "neither /logs/verifier/reward.json nor reward.txt was written")
    try:
        value = float(text)
    except ValueError as error:
        raise TaskError("reward_invalid", f"reward.txt: {_shown(text)} is not a number") from error
    return {"reward": _checked("reward.txt", "reward", value, ranges)}


def _from_json(content: bytes, ranges: Ranges) -> dict[str, float]:
    try:
        scores = msgspec.json.decode(content, type=dict[str, int | float])
    except msgspec.DecodeError as error:
        raise TaskError("reward_invalid", f"reward.json: {_shown(content)}: {error}") from error
    if "reward" not in scores:
        raise TaskError("reward_missing", f"reward.json has no key 'reward': {_shown(content)}")
    if len(scores) > MAX_NAMES or any(not 0 < len(name) <= MAX_NAME for name in scores):
        raise TaskError("reward_invalid", f"reward.json: over {MAX_NAMES} names, or one that is not of 1 to {MAX_NAME} letters")
    return {name: _checked(f"reward.json: {name}", name, value, ranges) for name, value in scores.items()}


def _checked(place: str, name: str, value: float, ranges: Ranges) -> float:
    low, high = ranges.get(name, (0.0, 1.0))
    if not (low <= value <= high and math.isfinite(value)):
        raise TaskError("reward_invalid", f"{place}: {value!r} is not in [{low:g}, {high:g}]")
    return (value - low) / (high - low)


def _shown(content: bytes) -> str:
    return repr(content[:80].decode(errors="replace"))
