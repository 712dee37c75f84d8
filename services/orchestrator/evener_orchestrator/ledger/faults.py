"""A database's failure is one of three: it chose us as a victim (again at once), it is down (later), or it is a real fault.

Read from SQLSTATE (Postgres's Appendix A) where there is one. Used by `engine.Ledger.write` and the consumer.
"""

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

FAULTS = (DBAPIError, PoolTimeout, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)
"""What a transaction raises where the database failed: by SQLAlchemy and its pool, or by the driver that `copy` speaks to
itself."""

VICTIM = frozenset({"40001", "40P01"})
"""serialization_failure and deadlock_detected: the same work succeeds when it is done again."""

DOWN_CLASSES = ("08", "25006", "53", "57P", "58")
"""Connection lost, read-only (a standby, or a full disk's remedy), out of resources, shut down or not yet started, a disk that
fails."""


def is_victim(error: Exception) -> bool:
    """Whether the transaction was rolled back only because another ran beside it."""
    return _sqlstate(error) in VICTIM


def is_down(error: Exception) -> bool:
    """Whether the database cannot be reached or takes no work now."""
    if isinstance(error, OSError | OperationalError | InterfaceError | PoolTimeout | asyncpg.InterfaceError):
        return True
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or _sqlstate(error).startswith(DOWN_CLASSES)


def _sqlstate(error: Exception) -> str:
    state = getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlstate", None)
    return state if isinstance(state, str) else ""
