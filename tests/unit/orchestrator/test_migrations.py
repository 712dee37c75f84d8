"""The migrations make the models' tables on both databases, every object says what it is, and a filled ledger survives them."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.ledger.models import Base
from evener_orchestrator.view_columns import COLUMNS, OWN, column_comment
from evener_orchestrator.views import VIEWS


async def test_the_migrations_make_the_models_tables(ledger):
    await migrate(ledger)  # again: nothing to do

    def compare(connection):
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return compare_metadata(context, Base.metadata), set(inspect(connection).get_view_names())

    async with ledger.writer.connect() as connection:
        differences, views = await connection.run_sync(compare)
    assert differences == []
    assert views == set(VIEWS)


def test_every_model_and_view_has_a_comment():
    for table in Base.metadata.sorted_tables:
        assert table.comment, table.name
        for column in table.columns:
            assert column.comment, column
    assert all(view.comment for view in VIEWS.values())


async def test_every_table_view_and_column_of_postgres_has_a_comment(two_on_postgres):
    without = text("""
        SELECT c.relname, a.attname FROM pg_class c
        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v') AND c.relname <> 'alembic_version'
          AND (col_description(c.oid, a.attnum) IS NULL AND a.attnum IS NOT NULL OR obj_description(c.oid) IS NULL)""")
    async with two_on_postgres[0].read() as session:
        assert (await session.execute(without)).all() == []
        described = await session.scalar(text("SELECT obj_description('fork_causes'::regclass)"))
        of_column = await session.scalar(text("SELECT col_description('harness_matrix'::regclass, 10)"))
    assert described == VIEWS["fork_causes"].comment
    assert of_column == column_comment("harness_matrix", "low")


async def test_every_column_of_a_view_is_described_and_nothing_else(ledger):
    async with ledger.writer.connect() as connection:
        columns = await connection.run_sync(
            lambda sync: {view: {each["name"] for each in inspect(sync).get_columns(view)} for view in VIEWS}
        )
    for view, names in columns.items():
        assert all(column_comment(view, name) for name in names)
    assert set().union(*columns.values()) == set(COLUMNS)
    assert all(set(own) <= columns[view] for view, own in OWN.items())


@pytest.fixture
def first_revision(monkeypatch):
    """`migrate` stops at the first revision."""
    from alembic import command

    upgrade = command.upgrade
    monkeypatch.setattr(command, "upgrade", lambda config, _: upgrade(config, "0001"))
    monkeypatch.setattr("evener_orchestrator.ledger.migrate._create_views", lambda _: None)
    monkeypatch.setattr("evener_orchestrator.ledger.migrate._comment", lambda _: None)
    monkeypatch.setattr("evener_orchestrator.ledger.reader.allow", lambda *_, **__: None)
    return monkeypatch


async def test_calls_archived_before_are_measured(database_url, first_revision):
    ledger = Ledger(database_url)
    await migrate(ledger)
    arrays = "x'0100000002000000', x'000000bf000080bf'" if ledger.sqlite else "'{1,2}', '{-0.5,-1.0}'"
    empty = "x''" if ledger.sqlite else "'{}'"
    statements = [
        "INSERT INTO runs (id, name, kind, state, policy, file, trusted, prompt_mode, step, evaluated_step, epoch, reason,"
        " created_at) VALUES ('r', 'n', 'train', 'running', 'p', '{}', true, 'render', 0, -1, 0, '', '2026-01-01')",
        "INSERT INTO tasks VALUES ('t', 't', '', '', '', '2026-01-01')",
        "INSERT INTO groups (id, run_id, task_digest, harness, profile, purpose, number, size, state, reason, created_at)"
        " VALUES ('g', 'r', 't', 'pi', 'default', 'train', 0, 1, 'open', '', '2026-01-01')",
        "INSERT INTO rollouts (id, run_id, group_id, number, state, attempt, detail, scorings, created_at)"
        " VALUES ('o', 'r', 'g', 0, 'running', 1, '', 0, '2026-01-01')",
        "INSERT INTO attempts (id, rollout_id, number, detail, sandbox, harness_version, created_at)"
        " VALUES ('o.1', 'o', 1, '', '', '', '2026-01-01')",
        "INSERT INTO calls (id, attempt_id, number, prompt_tokens, context_ids, completion_ids, logprobs, version_runs,"
        " version_dispatch, version_completion, request, reply, dialect, delivered, level, engine, started_at, ended_at)"
        f" VALUES ('c', 'o.1', 1, 0, {empty}, {arrays}, '[]', 1, 1, '{{}}', '{{\"tool_calls\": [{{}}, {{}}]}}', 'chat', 'yes',"
        " 'tokens', 'e', '2026-01-01', '2026-01-01')",
        "INSERT INTO sequences (id, attempt_id, number, token_ids, logprobs, mask_runs, version_runs, spans, trained_tokens,"
        " digest)"
        f" VALUES ('c', 'o.1', 0, {arrays}, '[]', '[]', '[]', 2, '')",
    ]
    async with ledger.writer.begin() as connection:
        for statement in statements:
            await connection.run_sync(lambda sync, statement=statement: sync.exec_driver_sql(statement))
    first_revision.undo()
    await migrate(ledger)
    async with ledger.read() as session:
        call = (await session.execute(text("SELECT sampled_tokens, logprob_sum, tools, fork FROM calls"))).one()
        assert tuple(call) == (2, -1.5, 2, None)
        assert await session.scalar(text("SELECT tokens FROM sequences")) == 2
        assert await session.scalar(text("SELECT tool_calls FROM trajectories")) == 2
    await ledger.close()
