"""Identifiers sort by the time they were made, so that a listing in id order is a listing in time order.

Every row, message and call is named by a UUIDv7 (RFC 9562, section 5.7). Used by every service.
"""

import os
import re
import time
import uuid
from typing import NamedTuple

_SESSION = re.compile(r"(?P<rollout>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.(?P<attempt>[1-9]\d{0,5})")


def new_id() -> str:
    """A UUIDv7 in canonical form: 48 bits of Unix milliseconds, then 74 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


class Session(NamedTuple):
    """An attempt as the proxy sees it."""

    rollout_id: str
    attempt: int


def session_id(rollout_id: str, attempt: int) -> str:
    """The session of attempt 1, 2, ... of a rollout: ``{rollout_id}.{attempt}``."""
    return f"{rollout_id}.{attempt}"


def parse_session_id(text: str) -> Session:
    """The inverse of `session_id`. Raises ValueError where ``text`` is not a session."""
    match = _SESSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a session id ({{rollout_id}}.{{attempt}})")
    return Session(match["rollout"], int(match["attempt"]))
