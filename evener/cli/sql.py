"""`evener sql`: one read-only query of the ledger. Nothing it runs can write."""

import sqlite3
from typing import Any

from evener.errors import InputError
from evener.settings import Settings


def query(settings: Settings, text: str) -> list[dict[str, Any]]:
    """The rows of a query. Raises InputError with the database's own message."""
    path = settings.data / "ledger.db"
    if not path.exists():
        raise InputError("not_found", f"{path} is no ledger; start with `evener run FILE`")
    connection = sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in connection.execute(text)]
    except sqlite3.Error as error:
        raise InputError("query_invalid", str(error)) from error
    finally:
        connection.close()
