"""A line of `evener doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """``state`` is ok, note (works, but worse) or missing."""

    name: str
    state: str
    detail: str
