"""A capture record holds a call exactly: the ids and log-probabilities are the bytes that the engine's numbers make.

Stored form, little-endian: a header of seven ``uint32`` (magic, base, shared, suffix, completion, runs, meta), then the
prompt's ``suffix`` int32 ids, the completion's int32 ids, its float32 log-probabilities, the run-length coded policy
versions (pairs of int32), and ``meta`` bytes of MessagePack. The prompt is the first ``shared`` tokens of the prompt +
completion of call number ``base``, then the suffix; base 0 means that nothing is shared. A base has a smaller number than
the call, so that decoding in order of number always finds it. Written by the proxy, read when a trace is archived.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Delivered = Literal["yes", "no", "unknown"]
Level = Literal["tokens", "text"]

_MAGIC = 0x31525645  # "EVR1"
_HEADER = struct.Struct("<7I")


class Base(NamedTuple):
    """The call that a prompt is a delta against, and how many leading tokens of its prompt + completion are the prompt's."""

    number: int
    shared: int


NO_BASE = Base(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class CallRecord:
    """One call of a session; the token arrays are whole, not deltas.

    ``versions`` names the policy version of each completion token, equal to ``version_dispatch`` where the engine does not
    say. ``request`` holds ``system_digests``, ``tools_digest``, the new ``messages`` (those after the first
    ``messages_kept`` of call number ``messages_base``), ``asked`` and ``used`` sampling, the ``flaw`` of token data that were
    not kept, and in prompt mode ``token_in`` the ``prompt``: the number of the call that it goes on ``from``, or why it was
    ``refused``; ``reply`` the canonical reply with the ids that we minted.
    """

    call_id: str
    session_id: str
    number: int
    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    versions: Ids
    version_dispatch: int
    version_completion: int
    request: dict[str, Any]
    reply: dict[str, Any]
    dialect: str
    started: float
    ended: float
    delivered: Delivered
    level: Level
    engine: str

    @property
    def tokens(self) -> Ids:
        """Prompt + completion, int32."""
        return np.concatenate((self.prompt_ids, self.completion_ids))


class _Meta(msgspec.Struct, array_like=True):
    call_id: str
    session_id: str
    number: int
    version_dispatch: int
    version_completion: int
    request: bytes
    reply: bytes
    dialect: str
    started: float
    ended: float
    level: Level
    engine: str


_encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(_Meta).decode
_encode_json = msgspec.json.Encoder().encode


def encode(record: CallRecord, base: Base = NO_BASE) -> bytes:
    """The stored form. ``delivered`` is not in it: it is known only later, and kept beside it."""
    suffix = record.prompt_ids[base.shared :]
    runs = _runs(record.versions)
    meta = _encode_meta(
        _Meta(
            record.call_id,
            record.session_id,
            record.number,
            record.version_dispatch,
            record.version_completion,
            _encode_json(record.request),
            _encode_json(record.reply),
            record.dialect,
            record.started,
            record.ended,
            record.level,
            record.engine,
        )
    )
    head = _HEADER.pack(_MAGIC, *base, len(suffix), len(record.completion_ids), len(runs) // 2, len(meta))
    arrays = (
        suffix.astype("<i4", copy=False).tobytes(),
        record.completion_ids.astype("<i4", copy=False).tobytes(),
        record.logprobs.astype("<f4", copy=False).tobytes(),
        runs.astype("<i4", copy=False).tobytes(),
    )
    return b"".join((head, *arrays, meta))


def decode(data: bytes, tokens: Mapping[int, Ids], delivered: Delivered = "unknown") -> CallRecord:
    """The inverse of `encode`; ``tokens`` maps the number of each earlier call to its prompt + completion.

    Raises ValueError where the data is not a whole record, KeyError where its base is missing.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"a capture record of {len(data)} bytes is shorter than its header")
    magic, base, shared, n_suffix, n_completion, n_runs, n_meta = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEADER.size + 4 * (n_suffix + 2 * n_completion + 2 * n_runs) + n_meta:
        raise ValueError(f"not a capture record, or a cut one ({len(data)} bytes)")
    at = _HEADER.size
    suffix = np.frombuffer(data, "<i4", n_suffix, at)
    at += 4 * n_suffix
    completion = np.frombuffer(data, "<i4", n_completion, at)
    at += 4 * n_completion
    logprobs = np.frombuffer(data, "<f4", n_completion, at)
    at += 4 * n_completion
    runs = np.frombuffer(data, "<i4", 2 * n_runs, at).reshape(-1, 2)
    meta = _decode_meta(data[at + 8 * n_runs :])
    return CallRecord(
        call_id=meta.call_id,
        session_id=meta.session_id,
        number=meta.number,
        prompt_ids=np.concatenate((tokens[base][:shared], suffix)) if base else suffix,
        completion_ids=completion,
        logprobs=logprobs,
        versions=np.repeat(runs[:, 0], runs[:, 1]),
        version_dispatch=meta.version_dispatch,
        version_completion=meta.version_completion,
        request=_document(meta.request),
        reply=msgspec.json.decode(meta.reply, type=dict[str, Any]),
        dialect=meta.dialect,
        started=meta.started,
        ended=meta.ended,
        delivered=delivered,
        level=meta.level,
        engine=meta.engine,
    )


def decode_reply(data: bytes) -> dict[str, Any]:
    """The canonical reply alone, which needs no other record."""
    n_meta = _HEADER.unpack_from(data)[6]
    return msgspec.json.decode(_decode_meta(data[len(data) - n_meta :]).reply, type=dict[str, Any])


def decode_all(stored: Mapping[int, bytes], delivered: Mapping[int, Delivered]) -> list[CallRecord]:
    """The calls of a session in order of number, each with its whole prompt. One whose base was lost is lost with it."""
    tokens: dict[int, Ids] = {}
    records: list[CallRecord] = []
    for number in sorted(stored):
        try:
            record = decode(stored[number], tokens, delivered.get(number, "unknown"))
        except KeyError:
            continue
        tokens[number] = record.tokens
        records.append(record)
    return records


def int32(values: Iterable[int]) -> Ids:
    """An int32 array of ``values``."""
    return np.fromiter(values, np.int32)


def _document(text: bytes) -> dict[str, Any]:
    """A request as it was sent. A number that no float holds, which JSON allows and databases do not, stays the text it is."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return json.loads(text, parse_float=lambda number: number if math.isinf(float(number)) else float(number))


def _runs(versions: Ids) -> Ids:
    """Pairs (version, how often), flat."""
    if len(versions) == 0:
        return np.empty(0, np.int32)
    if (versions == versions[0]).all():
        return np.array((versions[0], len(versions)), np.int32)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(versions)) + 1))
    counts = np.diff(np.concatenate((starts, [len(versions)])))
    return np.column_stack((versions[starts], counts)).astype(np.int32).ravel()
