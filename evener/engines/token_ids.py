"""Token ids from JSON text to int32 without a Python object each, which a prompt of 8,000 tokens would spend half a call on.

Eight digits are read at once, as one 64-bit number whose neighbouring digits, pairs and quadruples are joined by three
multiplications (D. Lemire, "Quickly parsing eight digits", 2018), for all ids together. Used by `evener.engines.replies`.
"""

from array import array
from typing import NamedTuple

import msgspec
import numpy as np

from evener.trace.record import Ids

_DIGITS = 8  # 100 million ids; vocabularies have less than one million
_KEEP = np.array([0x0F0F0F0F0F0F0F0F << 8 * (_DIGITS - width) & (1 << 64) - 1 for width in range(_DIGITS + 1)], np.uint64)
_JOIN = [(np.uint64((10**n << 8 * n) + 1), np.uint64(8 * n)) for n in (1, 2, 4)]
_MASK = [np.uint64(mask) for mask in (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)]
_list = msgspec.json.Decoder(list[int])


def token_ids(text: bytes) -> Ids:
    """The ids of a JSON list, int32. Raises msgspec.DecodeError where the text is not a list of int32."""
    compact = text.replace(b", ", b",") if b" " in text else text
    padded = b"0" * (_DIGITS - 1) + compact  # so that eight characters end at every id's last
    chars = np.frombuffer(padded, np.uint8)
    ends = np.flatnonzero(chars - np.uint8(ord("0")) > 9)
    width = np.diff(ends) - 1
    plain = compact[:1] == b"[" and compact[-1:] == b"]" and (chars[ends[1:-1]] == ord(",")).all()
    if not plain or width.min() < 1 or width.max() > _DIGITS:
        return _one_by_one(text)
    windows = np.ndarray((len(padded) - _DIGITS + 1,), "<u8", padded, strides=(1,))
    values = windows[ends[1:] - _DIGITS]
    values &= _KEEP[width]
    for (factor, shift), mask in zip(_JOIN, _MASK, strict=True):
        values *= factor
        values >>= shift
        values &= mask
    return values.astype(np.int32)


class _Known(NamedTuple):
    text: bytes
    ids: Ids


_NONE: Ids = np.empty(0, np.int32)

KNOWN_BYTES = 32 << 20  # 300 prompts of 8,000 tokens: more than a proxy has in its fast turns at once
KNOWN_SESSIONS = 4096  # what is kept of a short prompt weighs more than its bytes


class Prompts:
    """Reads the prompts of sessions. An agent's next prompt mostly begins with its last one: only what is new is read then."""

    def __init__(self, bound: int = KNOWN_BYTES) -> None:
        self._bound = bound
        self._bytes = 0
        self._known: dict[str, _Known] = {}  # by session, the one that was read last at the end

    def read(self, session: str, text: bytes) -> Ids:
        """`token_ids` of ``text``."""
        known = self._known.pop(session, None)
        self._bytes -= _size(known)
        new = _NONE
        if known is not None and text.startswith(known.text[:-1]) and text[len(known.text) - 1 : len(known.text)] == b",":
            new = token_ids(b"[" + text[len(known.text) :])
        ids = np.concatenate((known.ids, new)) if known is not None and new.size else token_ids(text)
        if ids.size:
            self._known[session] = known = _Known(text, ids)
            self._bytes += _size(known)
        while self._bytes > self._bound or len(self._known) > KNOWN_SESSIONS:
            self._bytes -= _size(self._known.pop(next(iter(self._known))))
        return ids


def _size(known: _Known | None) -> int:
    return len(known.text) + known.ids.nbytes if known is not None else 0


def _one_by_one(text: bytes) -> Ids:
    """The same for any JSON, however it is written."""
    try:
        return np.frombuffer(array("i", _list.decode(text)), np.int32)
    except OverflowError as error:
        raise msgspec.ValidationError(f"a token id is not an int32: {error}") from error
