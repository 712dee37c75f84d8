"""A pooled connection that lay idle is asked for a sign of life before it is used: Postgres may have restarted meanwhile.

One that was used a moment ago is not asked: SQLAlchemy's own ``pool_pre_ping`` costs four trips, a third of a transaction.
Where Postgres goes in just that moment the transaction fails, as one does that is under way. Called by `engine.Ledger`.
"""

import time
from typing import Any

from sqlalchemy import event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine

IDLE_S = 1.0
_USED = "used"


def ping_the_idle(engine: AsyncEngine) -> None:
    """Let ``engine``'s pool replace its connections when one is dead that lay for `IDLE_S` or more."""
    dialect = engine.dialect

    def check(connection: Any, record: Any, _proxy: object) -> None:
        if time.monotonic() - record.info.get(_USED, 0.0) < IDLE_S:
            return
        try:
            alive = dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError(str(error)) from error
        if not alive:
            raise InvalidatePoolError("no answer to a ping")

    def note(_connection: object, record: Any) -> None:
        record.info[_USED] = time.monotonic()

    event.listen(engine.sync_engine, "checkout", check)
    event.listen(engine.sync_engine, "checkin", note)
    event.listen(engine.sync_engine, "connect", note)
