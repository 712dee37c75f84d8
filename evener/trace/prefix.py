"""Equal digests at equal lengths stand for equal prefixes: SHA-256 over the little-endian int32 bytes of the ids.

One pass over a prompt compares it with every earlier call, where a trie would hold every token of the session. The proxy
keeps one `Head` a call to find the call that a new prompt extends, the archive compares all calls with one another.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evener.trace.record import NO_BASE, Base, Ids

HEADS_KEPT = 16  # an agent extends one of its last few calls; an older base costs only space
_HEAD = struct.Struct("<4I16s16s16s")
HEADS_BYTES = HEADS_KEPT * _HEAD.size


class Head(NamedTuple):
    """What is known of a committed call without its tokens: digests at two lengths, and of its messages."""

    number: int
    prompt: int
    total: int
    messages: int
    prompt_digest: bytes
    total_digest: bytes
    messages_digest: bytes


def pack_head(head: Head) -> bytes:
    """64 bytes."""
    return _HEAD.pack(*head)


def unpack_heads(data: bytes) -> list[Head]:
    """The heads in order of commit."""
    return [Head(*fields) for fields in _HEAD.iter_unpack(data)]


def prefix_digests(ids: Ids, lengths: Iterable[int]) -> dict[int, bytes]:
    """The 16-byte digest of the first n tokens for each n in ``lengths`` that is at most ``len(ids)``."""
    digests: dict[int, bytes] = {}
    running = hashlib.sha256()
    view = memoryview(ids.astype("<i4", copy=False).tobytes())
    done = 0
    for length in sorted(set(lengths)):
        if length > len(ids):
            break
        running.update(view[4 * done : 4 * length])
        digests[length] = running.digest()[:16]
        done = length
    return digests


def message_digests(messages: Sequence[bytes | memoryview], counts: Iterable[int]) -> dict[int, bytes]:
    """The 16-byte digest of the first n messages for each n in ``counts`` that is at most ``len(messages)``."""
    wanted = set(counts)
    digests: dict[int, bytes] = {}
    running = hashlib.sha256()
    for count, message in enumerate(messages, 1):
        running.update(len(message).to_bytes(8, "little"))
        running.update(message)
        if count in wanted:
            digests[count] = running.digest()[:16]
    return digests


def find_base(heads: Sequence[Head], digests: dict[int, bytes]) -> Base:
    """The call that shares the longest known prefix with a prompt whose ``digests`` were taken at the heads' lengths."""
    best = NO_BASE
    for head in heads:
        for length, digest in ((head.total, head.total_digest), (head.prompt, head.prompt_digest)):
            if length > best.shared and digests.get(length) == digest:
                best = Base(head.number, length)
    return best


def find_messages_base(heads: Sequence[Head], digests: dict[int, bytes]) -> Base:
    """The call whose messages are the longest known beginning of a request's messages."""
    best = NO_BASE
    for head in heads:
        if head.messages > best.shared and digests.get(head.messages) == head.messages_digest:
            best = Base(head.number, head.messages)
    return best
