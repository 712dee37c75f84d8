"""Column types that mean the same on SQLite and Postgres; only this module knows how each stores them.

Token arrays are ``int4[]`` / ``float4[]`` on Postgres (so that `unnest` works) and little-endian bytes on SQLite.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ARRAY, JSON, REAL, DateTime, Dialect, Integer, LargeBinary, String, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

E = TypeVar("E", bound=StrEnum)

Document = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
"""A JSON document."""


def storable(text: str) -> str:
    """A text without NUL, which Postgres has in no text and no JSON: it becomes U+FFFD, on SQLite as well."""
    return text.replace("\0", "\ufffd")


def as_json(value: Any) -> str:
    """A document as JSON that both databases take; what is not a number becomes null."""
    text = msgspec.json.encode(value).decode()
    return text if "\\u0000" not in text else msgspec.json.encode(_storable(value)).decode()


def _storable(value: Any) -> Any:
    match value:
        case str():
            return storable(value)
        case dict():
            return {storable(key): _storable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_storable(inner) for inner in value]
        case _:
            return value


class Timestamp(TypeDecorator[datetime]):
    """``timestamptz``; an aware datetime in UTC on both sides."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """SQLite compares texts: all are UTC, without an offset."""
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give SQLite's texts their zone back."""
        return value.replace(tzinfo=UTC) if value is not None and dialect.name == "sqlite" else value


class Word(TypeDecorator[E]):
    """A word of a closed list, stored as text."""

    impl = String(16)
    cache_ok = True

    def __init__(self, words: type[E]) -> None:
        super().__init__()
        self.words = words

    def process_bind_param(self, value: E | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's signature
        """The word as text."""
        return None if value is None else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> E | None:  # noqa: ARG002 - SQLAlchemy's signature
        """The member; a text that is none is a damaged ledger: ValueError."""
        return None if value is None else self.words(value)


class Tokens(TypeDecorator[NDArray[Any]]):
    """An array with one number a token: int32 ids, or float32 log-probabilities where ``real``."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, *, real: bool = False) -> None:
        super().__init__()
        self.real = real

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """An array on Postgres, bytes on SQLite."""
        if dialect.name == "sqlite":
            return dialect.type_descriptor(LargeBinary())
        return dialect.type_descriptor(ARRAY(REAL() if self.real else Integer()))

    def process_bind_param(self, value: NDArray[Any] | None, dialect: Dialect) -> Any:
        """Bytes or a list."""
        if value is None:
            return None
        array = np.asarray(value, dtype=self.dtype)
        return array.tobytes() if dialect.name == "sqlite" else array.tolist()

    def process_result_value(self, value: Any, dialect: Dialect) -> NDArray[Any] | None:
        """A read-only array."""
        if value is None:
            return None
        return np.frombuffer(value, dtype=self.dtype) if dialect.name == "sqlite" else np.asarray(value, dtype=self.dtype)

    @property
    def dtype(self) -> str:
        """The numpy type of an element."""
        return "<f4" if self.real else "<i4"
