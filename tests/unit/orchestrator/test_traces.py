"""What an archive holds comes back exactly from either database, with the attempt's end or not at all."""

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest
from sqlalchemy import func, select

from evener_orchestrator.archive import Archiver
from evener_orchestrator.ledger.models import Call, Sequence, SystemText
from evener_orchestrator.ledger.traces import store
from tests.unit.orchestrator.rows import a_group, a_rollout, a_run, a_task, an_attempt, write
from tests.unit.orchestrator.test_archive import SESSION, a_chain, sealed
from tests.unit.orchestrator.world import FakeTrace


async def an_archive(calls):
    trace = FakeTrace()
    trace.calls[SESSION] = calls
    return await Archiver(trace).read(SESSION, sealed=sealed(len(calls)), graded=True)


@pytest.fixture
async def filled(ledger):
    """A ledger with the attempt that the archives belong to."""
    rollout = SESSION.rsplit(".", 1)[0]
    await write(ledger, [a_run(), a_task()], [a_group("g")], [a_rollout(rollout, "g")], [an_attempt(rollout)])
    return ledger


def awkward_calls():
    """Numbers and texts at the edges of what the types hold."""
    first, second, last = a_chain([1, 2, 3])
    edges = np.array([2**31 - 1, -(2**31), 0], np.int32)
    logprobs = np.array([-3.4028235e38, -1.4e-45, -0.0], np.float32)
    messages = [{"role": "user", "content": "NUL \0, \\u0000, quote ', emoji 🐎, tab \t", "k\0": [None, True, 1.5, 2**53]}]
    return [
        first,
        dataclasses.replace(second, completion_ids=edges, logprobs=logprobs, request={"messages": messages}),
        dataclasses.replace(
            last,
            prompt_ids=np.concatenate((second.prompt_ids, edges)),
            completion_ids=np.array([], np.int32),
            logprobs=np.array([], np.float32),
            versions=np.array([], np.int32),
            reply={"content": None, "tool_calls": None},
            engine="http://machine/ü",
            started=1790000000.123456,
        ),
    ]


async def keep(ledger, *archives):
    async def work(tx):
        for archive in archives:
            store(tx, archive)

    await ledger.write(work)


async def test_an_archive_comes_back_exactly(filled):
    archive = await an_archive(awkward_calls())
    await keep(filled, archive)
    async with filled.read() as session:
        calls = (await session.scalars(select(Call).order_by(Call.number))).all()
        sequences = (await session.scalars(select(Sequence).order_by(Sequence.number))).all()
        assert await session.scalar(select(SystemText.body)) == "You are an agent."
    assert len(calls) == 3
    assert sequences
    for rows, stored in ((archive.calls, calls), (archive.sequences, sequences)):
        for row, back in zip(rows, stored, strict=True):
            for name, value in row.items():
                if isinstance(value, np.ndarray):
                    assert getattr(back, name).tobytes() == value.tobytes(), name
                elif name not in ("request", "reply"):
                    assert getattr(back, name) == value, name
    assert calls[2].started_at == datetime(2026, 9, 21, 14, 13, 20, 123456, tzinfo=UTC)
    assert calls[2].reply == {"content": None, "tool_calls": None}
    assert [call.tools for call in calls] == [1, 1, 0]
    (message,) = calls[1].request["messages"]
    assert message["content"] == "NUL \ufffd, \\u0000, quote ', emoji 🐎, tab \t"  # Postgres has no NUL
    assert message["k\ufffd"] == [None, True, 1.5, 2**53]


async def test_a_trace_without_its_attempts_end_is_not_kept(filled):
    archive = await an_archive(a_chain([1, 1]))

    async def fail(tx):
        store(tx, archive)
        await tx.finish()
        raise LookupError

    with pytest.raises(LookupError):
        await filled.write(fail)
    async with filled.read() as session:
        for model in (Call, Sequence, SystemText):
            assert await session.scalar(select(func.count()).select_from(model)) == 0
    await keep(filled, archive)  # and nothing is left of the try


async def test_traces_of_one_transaction_are_written_together_and_each_text_once(ledger):
    traces, archives = FakeTrace(), []
    await write(ledger, [a_run(), a_task()], [a_group("g")])
    for name in ("one", "two"):
        await write(ledger, [a_rollout(name, "g")], [an_attempt(name)])
        calls = [dataclasses.replace(call, call_id=f"{name}-{call.number}") for call in a_chain([1, 1])]
        traces.calls[f"{name}.1"] = calls
        archives.append(await Archiver(traces).read(f"{name}.1", sealed=sealed(len(calls)), graded=True))
    await keep(ledger, *archives)
    async with ledger.read() as session:
        found = await session.execute(select(Call.attempt_id, func.count()).group_by(Call.attempt_id))
        assert sorted(map(tuple, found)) == [("one.1", 2), ("two.1", 2)]
        assert await session.scalar(select(func.count()).select_from(SystemText)) == 1
        assert {row.attempt_id for row in await session.scalars(select(Sequence))} == {"one.1", "two.1"}


async def test_a_trace_is_written_once(filled):
    archive = await an_archive(a_chain([1]))
    await keep(filled, archive)
    with pytest.raises(Exception, match=r"(?i)unique"):
        await keep(filled, archive)
