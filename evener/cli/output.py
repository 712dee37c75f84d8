"""How every command prints: a table for people, or with ``--json`` the document that the API gave."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    out.file.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Rows as a table of the named columns; numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = any(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    out.print(table)


def cell(value: Any) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.0f}"
    return str(value)
