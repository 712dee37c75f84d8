"""An id may be given whole, as a unique suffix, or as ``latest``. Used by the API's reading side."""

from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from evener.errors import InputError
from evener_orchestrator.ledger.models import Group, Rollout, Run

T = TypeVar("T", Run, Group, Rollout)


async def find_any(session: AsyncSession, given: str) -> Run | Group | Rollout:
    """The rollout, group or run that ``given`` means (``latest``: the rollout). Raises InputError."""
    if given == "latest":
        return await find(session, Rollout, given)
    found: list[Run | Group | Rollout] = []
    for table in (Rollout, Group, Run):
        found += await session.scalars(select(table).where(table.id.endswith(given, autoescape=True)).limit(2))
    if not found:
        raise InputError("not_found", f"rollout, group or run {given!r}")
    if len(found) > 1:
        raise InputError("request_invalid", f"{given!r} is the end of several ids; give more of it")
    return found[0]


async def find(session: AsyncSession, table: type[T], given: str) -> T:
    """The row that ``given`` means. Raises InputError where there is none, or more than one."""
    what = f"{table.__name__.lower()} {given!r}"
    if given == "latest":
        newest = (await session.scalars(select(table).order_by(table.id.desc()).limit(1))).one_or_none()
        if newest is None:
            raise InputError("not_found", what)
        return newest
    rows = (await session.scalars(select(table).where(table.id.endswith(given, autoescape=True)).limit(2))).all()
    if not rows:
        raise InputError("not_found", what)
    if len(rows) > 1:
        raise InputError("request_invalid", f"{what} is the end of several ids; give more of it")
    return rows[0]
