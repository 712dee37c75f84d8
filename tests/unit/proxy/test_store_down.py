"""While Redis takes nothing, no agent that ends over it is graded, and no further attempt is begun."""

import contextlib

import pytest
from redis.exceptions import ResponseError

from evener.trace.store import TraceStore
from evener_runner.outcome import Ending, classify
from tests.unit.proxy.stub import eventually, fails, running_proxy

AGAIN = [{"role": "user", "content": "go on"}]


@contextlib.contextmanager
def full(*names):
    """The store refuses these writes, as a Redis without memory does."""

    async def refuse(*_, **__):
        raise ResponseError("OOM command not allowed when used memory > 'maxmemory'.")

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(TraceStore, name, refuse)
        yield


@pytest.mark.parametrize("refused", [("intent", "release"), ("commit", "release"), ("commit",), ("intent",)])
async def test_infra_is_not_a_grade_where_a_call_was_not_captured(proxy, engine, refused):
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    with full(*refused):
        assert (await proxy.chat(key, AGAIN))[0] == 503
    verdict = classify(Ending(exit_code=1, state=await proxy.admin.seal(session)))
    assert (verdict.outcome, verdict.cause) == ("infra_error", "capture_unavailable")


@pytest.mark.parametrize("refused", [("intent", "release"), ("commit", "release")])
async def test_who_is_answered_later_is_graded(proxy, engine, refused):
    session, key = await proxy.open()
    with full(*refused):
        assert (await proxy.chat(key, AGAIN))[0] == 503
    assert (await proxy.chat(key, AGAIN))[0] == 200
    state = await proxy.admin.seal(session)
    assert (state.fault, state.in_flight) == (None, 0)
    assert classify(Ending(exit_code=0, state=state)).outcome == "finished"


async def test_another_replica_seals_after_what_failed_in_an_outage_is_told(proxy, engine, redis):
    async with running_proxy(engine, redis, retry_s=1.0) as other:
        session, key = await proxy.open()
        assert (await proxy.chat(key))[0] == 200

        async def noticed() -> bool:
            return "OOM" in (await other.admin.problem() or "")

        with full("intent", "release", "beat"):
            assert (await proxy.chat(key, AGAIN))[0] == 503
            await eventually(noticed)
        verdict = classify(Ending(exit_code=1, state=await other.admin.seal(session)))
        assert (verdict.outcome, verdict.cause) == ("infra_error", "capture_unavailable")


async def test_a_fault_whose_release_failed_is_told_all_the_same(proxy, engine):
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    engine.script += [fails(500)] * 99
    with full("release"):
        assert (await proxy.chat(key, AGAIN))[0] == 503
    verdict = classify(Ending(exit_code=1, state=await proxy.admin.seal(session)))
    assert (verdict.outcome, verdict.cause) == ("infra_error", "engine_unavailable")


async def test_an_exit_code_of_0_after_a_refused_request_lies(proxy, engine):
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    engine.script.append(fails(400, "no such tool"))
    assert (await proxy.chat(key, AGAIN))[0] == 400
    verdict = classify(Ending(exit_code=0, state=await proxy.admin.seal(session)))
    assert (verdict.outcome, verdict.cause) == ("agent_error", "agent_exit")
    assert "no such tool" in verdict.detail


async def test_no_attempt_is_begun_while_the_store_takes_nothing(proxy):
    async def ready() -> bool:
        return await proxy.admin.problem() is None

    async def refused() -> bool:
        return "OOM" in (await proxy.admin.problem() or "")

    await eventually(ready)
    with full("beat"):
        await eventually(refused)
    await eventually(ready)
