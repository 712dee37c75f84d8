"""`evener sql` says where the ledger is when it is not here."""

from pathlib import Path

import pytest

from evener.cli import sql
from evener.errors import InputError
from evener.settings import Settings


@pytest.mark.parametrize(
    ("url", "cause", "told"),
    [(None, "not_found", "evener run FILE"), ("http://api:8700", "settings_invalid", "exec orchestrator evener sql")],
)
def test_a_ledger_that_is_elsewhere_is_named(tmp_path: Path, url: str | None, cause: str, told: str):
    with pytest.raises(InputError, match=told) as raised:
        sql.query(Settings(data=tmp_path, url=url), "select 1")
    assert raised.value.cause == cause
