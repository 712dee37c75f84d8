"""Every query of docs/sql.md gives its hand-counted answer on both databases, through `evener sql`, and the doc shows it."""

import asyncio
import io
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from evener.cli import output, sql
from evener.errors import InputError
from evener.settings import Settings
from evener_orchestrator.ledger.reader import ROLE
from tests.services import find, postgres_folders
from tests.unit.orchestrator.first_run import seed

DOC = Path(__file__).parents[3] / "docs" / "sql.md"
QUESTION = re.compile(r"^### (.*?)$.*?^```sql\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 118

PROMPT, SAMPLED = "prompt", "sampled"
ANSWERS = [
    [  # version 3, codex: one of four failed through a fault of ours
        (1, "codex", 4, 2, 0.5, 0.15, 0.85),
        (1, "pi", 4, 3, 0.75, 0.301, 0.954),
        (3, "codex", 3, 1, 0.333, 0.061, 0.792),
        (3, "pi", 4, 4, 1.0, 0.51, 1.0),
    ],
    [("count", 1.0, 0.0)],
    [("codex", 1, 2.0), ("pi", 2, 1.0)],
    [("codex", "retokenised", 2, 2), ("codex", "history_edited", 1, 1), ("pi", "retry", 1, 1), ("pi", "subagent", 1, 1)],
    [(1, 2, 2, 0.0, 0), (2, 3, 2, 0.5, 1)],
    [("codex", "count", 2, 1, 0.75), ("codex", "rename", 2, 1, 0.25), ("pi", "count", 1, 0, 0.5), ("pi", "rename", 1, 0, 0.5)],
    [("lease_expired", 2, 1, 0), ("calls_lost", 1, 1, 1), ("sandbox_failed", 1, 1, 0)],
    # codex: 15 rollouts of 3 calls, three with a fourth: (15 * 12 + 3 * 4) / (15 * 16); pi: (12 * 8 + 2 * 4) / (12 * 16)
    [("codex", 15, 0.8, 1.0, 1), ("pi", 12, 0.542, 0.75, 0)],
    # two rollouts with two (codex) or one (pi) calls of a tool, four tokens each
    [(1, "codex", 16, -1.0), (1, "pi", 8, -1.0), (2, "codex", 16, -0.5), (2, "pi", 8, -1.0)],
    [
        *((0, place, PROMPT, 10 + place, None, None) for place in range(6)),
        *((0, 6 + place, SAMPLED, 110 + place, -1.0, 1) for place in range(4)),
        (0, 10, PROMPT, 21, None, None),
        (0, 11, PROMPT, 30, None, None),
        *((0, 12 + place, SAMPLED, 120 + place, -1.0, 1) for place in range(4)),
    ],
]


def questions():
    return QUESTION.findall(DOC.read_text())


@pytest.fixture
async def ask(ledgers, database_url, tmp_path):
    """`evener sql` on the example run."""
    await ledgers[0].write(seed)
    settings = Settings(data=tmp_path, database_url=database_url)

    async def ask(query, **options):
        return await asyncio.to_thread(sql.query, settings, query, **options)

    ask.postgres = not ledgers[0].sqlite
    return ask


def printed(rows, monkeypatch):
    """What `evener sql` prints."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    monkeypatch.setattr(output, "out", console)
    output.print_table(rows, list(rows[0]))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_doc_asks_ten_questions():
    assert len(questions()) == len(ANSWERS) == 10


async def test_the_docs_queries_give_the_counted_answers(ask, monkeypatch):
    for (question, query, shown), expected in zip(questions(), ANSWERS, strict=True):
        rows = await ask(query)
        assert [tuple(row.values()) for row in rows] == expected, question
        assert printed(rows, monkeypatch) == shown, question


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_psql_as_the_reader_answers_them_all(ask, database_url):
    place = urlsplit(database_url)
    if place.password:
        pytest.skip("the reader has no password, and EVENER_TEST_DATABASE_URL's server asks for one")
    psql = find("psql", *postgres_folders())
    assert psql
    address = f"postgresql://{ROLE}@{place.hostname}:{place.port}{place.path}"
    for (question, query, _), expected in zip(questions(), ANSWERS, strict=True):
        argv = [psql, "--no-psqlrc", "--csv", "--tuples-only", "-c", query, address]
        asked = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=30, check=False)
        assert (asked.returncode, asked.stderr) == (0, ""), question
        assert len(asked.stdout.splitlines()) == len(expected), question


async def test_nothing_that_is_asked_can_write(ask):
    for statement in (
        "DELETE FROM runs",
        "CREATE TABLE t (id integer)",
        "INSERT INTO texts VALUES ('d', 'x')",
        "SELECT 1; DELETE FROM runs",
        "SELEC 1",
    ):
        with pytest.raises(InputError):
            await ask(statement)
    if ask.postgres:
        for statement in (
            "SELECT lease_hash FROM attempts",
            "DO $$ BEGIN RESET ROLE; SET TRANSACTION READ WRITE; DELETE FROM runs; END $$",
        ):
            with pytest.raises(InputError):
                await ask(statement)
        for statement in ("COMMIT", "ROLLBACK", "SELECT lo_create(0)"):
            await ask(statement)
        assert await ask("SELECT count(*) AS n FROM pg_largeobject_metadata") == [{"n": 0}]
        assert await ask("SELECT current_user AS who") == [{"who": ROLE}]
    assert await ask("SELECT count(*) AS n FROM runs") == [{"n": 1}]


async def test_a_query_ends_at_its_limit(ask):
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(InputError, match=r"took longer|statement timeout"):
        await ask(forever, limit_s=0.5)


async def test_a_database_that_does_not_answer_is_named():
    settings = Settings(database_url="postgresql+asyncpg://nobody@127.0.0.1:1/none")
    with pytest.raises(InputError, match="EVENER_DATABASE_URL"):
        await asyncio.to_thread(sql.query, settings, "SELECT 1")
