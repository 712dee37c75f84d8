"""A trace enters the ledger as deltas and runs, and a damaged one is named as a fault of ours."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.ids import session_id
from evener.messages import Sealed
from evener.trace.provenance import untrue
from evener_orchestrator.archive import Archiver
from evener_orchestrator.ledger.groups import trained
from evener_orchestrator.ledger.models import Sequence
from tests.unit.orchestrator.world import FakeTrace, a_call

SESSION = session_id("01a22899-4263-752e-a9db-46e524203e52", 1)


def sealed(committed):
    return Sealed(committed=committed, aborted=0, lost=0, undelivered=0)


def a_chain(versions):
    """Calls of which each goes on from the one before, with two tokens of context between."""
    calls = []
    for number, version in enumerate(versions, 1):
        call = a_call(SESSION, number, version)
        if calls:
            prompt = np.concatenate([calls[-1].tokens, np.array([40 + number, 41], np.int32)])
            call = replace(call, prompt_ids=prompt)
        calls.append(call)
    return calls


def replace(call, **changes):
    fields = {name: getattr(call, name) for name in call.__dataclass_fields__}
    return type(call)(**fields | changes)


async def read(calls, committed=None, graded=True):
    trace = FakeTrace()
    trace.calls[SESSION] = calls
    committed = len(calls) if committed is None else committed
    return await Archiver(trace).read(SESSION, sealed=sealed(committed), graded=graded)


@given(versions=st.lists(st.integers(1, 5), min_size=1, max_size=6))
async def test_a_chain_is_stored_once_and_comes_back_exactly(versions):
    calls = a_chain(versions)
    archive = await read(calls)
    assert archive.fault is None
    # the prompts, from the parents' tokens and what was added
    tokens = {None: np.array([], np.int32)}
    for call, row in zip(calls, archive.calls, strict=True):
        prompt = np.concatenate([tokens[row["parent_id"]], row["context_ids"]])
        assert prompt.tolist() == call.prompt_ids.tolist()
        tokens[call.call_id] = np.concatenate([prompt, row["completion_ids"]])
    # the one sequence, from runs
    (row,) = archive.sequences
    wire = trained(Sequence(**row))
    arrays = np.frombuffer(wire.ids, np.int32), np.frombuffer(wire.mask, np.uint8)
    assert (
        untrue(wire.provenance, *arrays, np.frombuffer(wire.logprobs, np.float32), np.frombuffer(wire.versions, np.int32))
        is None
    )
    mask, versions_ = np.frombuffer(wire.mask, np.uint8), np.frombuffer(wire.versions, np.int32)
    assert np.frombuffer(wire.ids, np.int32).tolist() == calls[-1].tokens.tolist()
    assert len(wire.mask) * 4 == len(wire.ids) == len(wire.logprobs) == len(wire.versions)
    assert versions_[mask == 1].tolist() == [version for version in versions for _ in range(3)]
    assert not versions_[mask == 0].any()
    assert (archive.version_min, archive.version_max) == (min(versions), max(versions))
    assert archive.sampled_tokens == int(mask.sum()) == row["trained_tokens"]


@pytest.mark.parametrize(
    "damage",
    [
        {"logprobs": np.array([-0.5, -0.5], np.float32)},
        {"versions": np.array([1], np.int32)},
    ],
)
async def test_a_damaged_call_is_never_graded(damage):
    archive = await read([replace(a_call(SESSION, 1, 1), **damage)])
    assert archive.fault is not None
    assert archive.fault[0] == "capture_gap"
    assert archive.sequences == []


@pytest.mark.parametrize("logprob", [np.nan, np.inf, -np.inf, 0.5])
async def test_a_call_whose_log_probabilities_prove_nothing_is_context(logprob):
    first, second = a_chain([1, 1])
    first = replace(first, logprobs=np.array([-0.5, logprob, 0.0], np.float32))
    archive = await read([first, second])
    assert archive.fault is None
    (row,) = archive.sequences
    assert row["mask_runs"] == [[10, 13]]
    assert row["provenance"]["untrained"] == {"failed_checks": 3}
    assert np.isfinite(archive.calls[0]["logprob_sum"])
    (alone,) = (await read([first])).calls
    assert alone["call_class"] == "agent"


async def test_a_missing_call_is_never_graded():
    archive = await read(a_chain([1, 1]), committed=3)
    assert archive.fault == ("capture_gap", "3 calls were sealed, 2 are archived")


async def test_what_is_not_graded_is_archived_for_people_alone():
    archive = await read(a_chain([1, 1]), committed=3, graded=False)
    assert archive.fault is None
    assert len(archive.calls) == 2
    assert archive.sequences == []


def test_a_sequence_travels_as_messagepack():
    row = Sequence(
        id="s",
        token_ids=np.arange(4, dtype="<i4"),
        logprobs=np.zeros(4, "<f4"),
        mask_runs=[[1, 3]],
        version_runs=[[1, 2, 5], [2, 3, 6]],
        digest="d",
        provenance={
            "session_id": "s",
            "given": 2,
            "sampled": 2,
            "trained": 2,
            "untrained": {},
            "versions": {"5": 1, "6": 1},
            "engines": [],
            "calls": [],
        },
    )
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(trained(row)))
    assert np.frombuffer(wire["versions"], np.int32).tolist() == [0, 5, 6, 0]
    assert list(wire["mask"]) == [0, 1, 1, 0]
    assert wire["provenance"]["versions"] == {"5": 1, "6": 1}
