"""The arguments of a tool call as a value: agents write JSON anew, so that two spellings of one value are the same.

Used where a turn is looked for in a history: by the proxy's token-in prompts, and by `histories` for what the trace tells.
"""

import json
import math
from typing import Any

_EXACT = 2**53  # JavaScript writes 1.0 as 1; beyond this it keeps no integer


def parsed(arguments: str) -> Any:
    """The value; no text is no arguments. Raises ValueError where it is no JSON, or nested too deeply to be read."""
    try:
        return json.loads(arguments or "{}", parse_float=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def spelled(value: Any) -> str:
    """A value of JSON in one spelling, in ASCII: half a character survives in it."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)


def _number(text: str) -> float | int | str:
    value = float(text)
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() and abs(value) < _EXACT else value
