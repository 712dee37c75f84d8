"""Request bodies that are wrong in one or more ways: in a value, in the shape, or in the bytes."""

import json
import random
from collections.abc import Iterator
from typing import Any

_VALUES: list[Any] = [None, True, -1, 0, 10**30, 1.5, "", "x", "\U0001f600", [], [None], ["x"], [[]], {}, {"type": "text"}]
_BYTES = (b"\xff", b"NaN", b"1e999", b'"\\ud800"', b"{", b"]", b",", b"\x00", b"Infinity", b'"type":"image",', b"-")


def mutated(body: bytes, rng: random.Random) -> bytes:
    """The body with up to three mutations."""
    for _ in range(rng.randint(1, 3)):
        body = _in_bytes(body, rng) if rng.random() < 0.25 else _in_shape(body, rng)
    return body


def _in_bytes(body: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(body) + 1)
    match rng.randrange(4):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + rng.choice(_BYTES) + body[at:]
        case 2:
            return body[:at] + rng.randbytes(1) + body[at + 1 :]
        case _:
            deep = rng.choice([50, 150, 3000])
            return body.replace(b'"text"', b'{"content":[' * deep + b"1" + b"]}" * deep, 1)


def _in_shape(body: bytes, rng: random.Random) -> bytes:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return _in_bytes(body, rng)
    places = list(_places(document))
    if not places:
        return _in_bytes(body, rng)
    parent, key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent["unknown"] = parent.pop(key)
        case 2 if isinstance(parent, list):
            parent.append(parent[key])
        case 3:
            other, at = rng.choice(places)
            parent[key] = json.loads(json.dumps(other[at]))
        case _:
            parent[key] = rng.choice(_VALUES)
    return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a document: what holds it, and under which key or index."""
    stack = [value]
    while stack:
        current = stack.pop()
        keys = list(current) if isinstance(current, dict) else range(len(current)) if isinstance(current, list) else ()
        for key in keys:
            yield current, key
            stack.append(current[key])
