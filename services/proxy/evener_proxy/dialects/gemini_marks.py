"""What Gemini's opaque ``thoughtSignature`` holds here: which reply a part is of, and the ids of that reply's calls.

Agents send signatures back with the parts of a reply, often without the calls' ids and over several contents. A signature that
is not ours says nothing. Called by `evener_proxy.dialects.gemini`.
"""

import base64
import binascii
import re
from dataclasses import dataclass

from evener_proxy.canonical import Reply

_WORD = "evener"
_STANDARD = str.maketrans("-_", "+/")
# gemini-cli puts the tool's name and two underscores before an id.
_prefixed_id = re.compile(r".*__(call_[0-9a-f]{24})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Mark:
    """A reply's id, and its calls' ids in order."""

    reply: str
    calls: tuple[str, ...]


def sign(reply: Reply) -> str:
    """The signature of a reply's parts."""
    words = (_WORD, reply.id, *(call.id for call in reply.tool_calls))
    return base64.b64encode(" ".join(words).encode()).decode()


def read_mark(signature: str | None) -> Mark | None:
    """What a signature of ours says, in either alphabet of base64; None for any other."""
    if not signature:
        return None
    try:
        words = base64.b64decode(standard_base64(signature), validate=True).decode().split(" ")
    except (binascii.Error, ValueError):
        return None
    return Mark(words[1], tuple(words[2:])) if words[0] == _WORD and len(words) > 1 else None


def standard_base64(data: str) -> str:
    """Base64 of either alphabet, as data URLs have it. Google's Python client sends the URL-safe one."""
    return data.translate(_STANDARD)


def bare_id(call_id: str | None) -> str | None:
    """The id without what an agent put before one of ours; None where there is none."""
    if not call_id:
        return None
    found = _prefixed_id.fullmatch(call_id)
    return found[1] if found else call_id
