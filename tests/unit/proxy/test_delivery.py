"""Failures on the way: engines that fail, agents that leave, seals in mid-call, replicas that die, late replies."""

import asyncio
import json

import openai
import pytest
from aiohttp import web
from redis.exceptions import RedisError

from evener.api.types import Budget
from evener.engines.vllm import VllmSampler
from evener.errors import InfraError, InputError
from evener.settings import Settings
from evener.trace.store import Sending, TraceStore
from evener_proxy import sessions
from evener_proxy.calls import Calls
from evener_proxy.dialects.chat import ChatDialect
from evener_proxy.engines import Engines
from evener_proxy.metrics import Metrics
from evener_proxy.service import serve
from evener_proxy.sessions import Flight, Sessions
from evener_runner.outcome import Ending, classify
from tests.ports import free_port
from tests.unit.proxy.stub import eventually, fails, running_proxy, session_spec


def slow(engine, seconds):
    async def behave(_, body):
        await asyncio.sleep(seconds)
        return web.json_response(engine.sample(body))

    return behave


async def test_an_engines_failures_are_retried_inside_and_counted(proxy, engine):
    async def cut(_, body):
        reply = engine.sample(body)
        engine.sampled.clear()
        reply["choices"][0]["finish_reason"] = "abort"
        return web.json_response(reply)

    engine.script += [fails(500), cut]
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    state = await proxy.admin.read(session)
    assert (state.engine_failures, state.calls, state.fault) == (2, 1, None)
    (record,) = await proxy.store.load(session)
    assert record.completion_ids.tolist() == engine.sampled[0]["ids"]


async def test_an_engine_that_stays_down_is_503_with_retry_after_and_no_reply(proxy, engine):
    engine.script += [fails(503)] * 20
    session, key = await proxy.open()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with proxy.http.post(proxy.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "5"
        assert json.loads(await response.read())["error"]["code"] == "engine_unavailable"
    state = await proxy.admin.read(session)
    assert (state.fault, state.calls, state.in_flight) == ("engine_unavailable", 0, 0)
    assert state.engine_failures >= 2
    assert (await proxy.admin.seal(session)).sealed.aborted == 1


async def test_an_engines_400_is_the_agents_error(proxy, engine):
    engine.script.append(fails(400, "bad tool", "tools"))
    session, key = await proxy.open()
    status, reply = await proxy.chat(key)
    assert (status, reply["error"]["message"]) == (400, "bad tool")
    assert len(engine.asked) == 1
    assert (await proxy.admin.read(session)).fault is None


async def test_bad_token_data_costs_only_its_call(proxy, engine):
    async def short(_, body):
        reply = engine.sample(body)
        reply["choices"][0]["token_ids"].pop()
        return web.json_response(reply)

    async def positive(_, body):
        reply = engine.sample(body)
        reply["choices"][0]["logprobs"]["content"][0]["logprob"] = 0.5
        return web.json_response(reply)

    engine.script += [short, positive]
    session, key = await proxy.open()
    for _ in range(3):
        assert (await proxy.chat(key))[0] == 200
    records = await proxy.store.load(session)
    assert [record.level for record in records] == ["text", "text", "tokens"]
    assert "differ in number" in records[0].request["flaw"]
    assert (await proxy.admin.read(session)).fault is None


async def test_a_late_reply_is_kept_alive_in_both_forms(hasty, engine):
    engine.script += [slow(engine, 0.6), slow(engine, 0.6)]
    _, key = await hasty.open()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with hasty.http.post(hasty.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}) as response:
        raw = await response.read()
    assert raw.startswith(b"  ")
    assert json.loads(raw)["object"] == "chat.completion"
    body["stream"] = True
    async with hasty.http.post(hasty.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}) as response:
        raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:3] == [{"role": "assistant", "content": ""}, {"content": ""}, {"content": ""}]
    assert [delta for delta in deltas if "role" in delta] == deltas[:1]
    assert "".join(delta.get("content", "") for delta in deltas) == "reply 1"


async def test_a_late_stream_is_the_reply_for_the_client_library(hasty, engine):
    engine.script.append(slow(engine, 0.6))
    _, key = await hasty.open()
    client = openai.AsyncOpenAI(base_url=hasty.url + "/v1", api_key=key, max_retries=0)
    async with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert (final.choices[0].message.role, final.choices[0].message.content) == ("assistant", "reply 0")
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None


async def test_a_late_response_is_kept_alive_by_events(hasty, engine):
    engine.script.append(slow(engine, 0.6))
    _, key = await hasty.open()
    client = openai.AsyncOpenAI(base_url=hasty.url + "/v1", api_key=key, max_retries=0)
    async with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds.count("response.in_progress") >= 2
    assert final.status == "completed"


async def test_a_late_error_reaches_a_streaming_client(hasty, engine):
    async def late(request, body):
        await asyncio.sleep(0.5)
        return await fails(400, "too late")(request, body)

    engine.script.append(late)
    _, key = await hasty.open()
    client = openai.AsyncOpenAI(base_url=hasty.url + "/v1", api_key=key, max_retries=0)
    stream = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True)
    with pytest.raises(openai.APIError, match="too late"):
        async for _ in stream:
            pass


async def test_an_agent_that_leaves_aborts_upstream_and_its_tokens_are_free_again(proxy, engine):
    engine.script.append(slow(engine, 30))
    session, key = await proxy.open(budget=Budget(sampled_tokens=20))
    asking = asyncio.create_task(proxy.chat(key))

    async def asked() -> bool:
        return len(engine.asked) == 1

    await eventually(asked)
    asking.cancel()

    async def aborted() -> bool:
        return engine.aborted == 1 and (await proxy.admin.read(session)).in_flight == 0

    await eventually(aborted, seconds=2)
    assert (await proxy.chat(key))[0] == 200
    sealed = (await proxy.admin.seal(session)).sealed
    assert (sealed.committed, sealed.aborted, sealed.lost) == (1, 1, 0)


async def test_no_more_calls_than_the_budgeted_reach_the_engine_where_agents_leave(proxy, engine):
    engine.script += [slow(engine, 30)] * 7
    session, key = await proxy.open(budget=Budget(calls=7, sampled_tokens=10**6))
    asking = [asyncio.create_task(proxy.chat(key, [{"role": "user", "content": str(n)}])) for n in range(100)]

    async def asked() -> bool:
        return len(engine.asked) == 7

    await eventually(asked)
    for task in asking:
        task.cancel()

    async def none_in_flight() -> bool:
        return engine.aborted == 7 and (await proxy.admin.read(session)).in_flight == 0

    await eventually(none_in_flight, seconds=5)
    status, reply = await proxy.chat(key)
    assert (status, reply["choices"][0]["message"]["content"][:8]) == (200, "[evener]")
    assert len(engine.asked) == 7
    state = await proxy.admin.read(session)
    assert (state.budget_spent, state.calls, state.sampled_tokens) == ("calls", 0, 0)


async def test_an_agent_that_leaves_while_engines_fail_has_not_had_its_call(proxy, engine):
    engine.script += [fails(503)] * 2
    session, key = await proxy.open(budget=Budget(calls=1))
    asking = asyncio.create_task(proxy.chat(key))

    async def failed() -> bool:
        return len(engine.asked) == 2

    await eventually(failed)
    await asyncio.sleep(0.1)  # the next try is half a second later
    asking.cancel()

    async def released() -> bool:
        return (await proxy.admin.read(session)).in_flight == 0

    await eventually(released)
    assert (await proxy.chat(key))[1]["choices"][0]["message"]["content"].startswith("reply")


async def test_a_seal_aborts_calls_in_flight_and_their_late_commit_is_refused(proxy, engine):
    engine.script.append(slow(engine, 30))
    session, key = await proxy.open()
    asking = asyncio.create_task(proxy.chat(key))

    async def asked() -> bool:
        return len(engine.asked) == 1

    await eventually(asked)
    sealed = (await proxy.admin.seal(session)).sealed
    assert (sealed.committed, sealed.aborted, sealed.lost) == (0, 1, 0)
    async with asyncio.timeout(10):
        status, reply = await asking
    assert (status, reply["error"]["code"]) == (403, "session_sealed")
    assert engine.aborted == 1


async def test_another_replicas_seal_is_heard_at_once(proxy, engine, monkeypatch):
    monkeypatch.setattr(sessions, "BEAT_S", 60)
    engine.script.append(slow(engine, 30))
    session, key = await proxy.open()
    asking = asyncio.create_task(proxy.chat(key))

    async def asked() -> bool:
        return len(engine.asked) == 1

    await eventually(asked)
    await asyncio.sleep(1.1)  # the watch of the default beat is asleep for a minute
    await TraceStore(proxy.redis).seal(session)
    async with asyncio.timeout(2.5):
        _, reply = await asking
    assert reply["error"]["code"] == "session_sealed"


async def ask(proxy, key, *, again=0, content="hi"):
    headers = {"x-api-key": key, "x-stainless-retry-count": str(again)}
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    async with proxy.http.post(proxy.url + "/v1/chat/completions", json=body, headers=headers) as response:
        return (await response.json())["choices"][0]["message"]["content"]


async def test_once_a_request_that_is_sent_again_gets_the_stored_reply(proxy, engine, redis):
    async with running_proxy(engine, redis) as other:
        session, key = await proxy.open()
        assert await ask(proxy, key) == "reply 0"
        assert await ask(other, key, again=1) == "reply 0"
        assert await ask(proxy, key, again=1, content="new") == "reply 1"
        assert await ask(proxy, key) == "reply 2", "the same body after a delivered reply is a new sample"
        assert await ask(other, key, again=2) == "reply 2"
        assert len(await proxy.store.load(session)) == len(engine.asked) == 3


async def test_once_a_request_that_is_sent_again_gets_the_pending_reply(proxy, engine, redis):
    async with running_proxy(engine, redis) as other:
        engine.script.append(slow(engine, 0.6))
        session, key = await proxy.open()
        first = asyncio.create_task(ask(proxy, key))

        async def asked() -> bool:
            return len(engine.asked) == 1

        await eventually(asked)
        assert await ask(other, key, again=1) == "reply 0"
        assert await first == "reply 0"
        assert len(await proxy.store.load(session)) == len(engine.asked) == 1


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_once_a_pending_reply_survives_its_client_for_the_retry_that_waits(proxy, engine, redis, elsewhere):
    """The retry comes before the proxy hears that the first client has gone; the one call that is left is not lost."""
    async with running_proxy(engine, redis) as other:
        engine.script.append(slow(engine, 2.5))
        session, key = await proxy.open(budget=Budget(calls=1))
        first = asyncio.create_task(ask(proxy, key))

        async def asked() -> bool:
            return len(engine.asked) == 1

        await eventually(asked)
        retry = asyncio.create_task(ask(other if elsewhere else proxy, key, again=1))
        await asyncio.sleep(0.3)
        first.cancel()
        assert await retry == "reply 0"
        assert (len(engine.asked), engine.aborted) == (1, 0)
        assert len(await proxy.store.load(session)) == 1


async def test_a_pending_reply_that_nobody_waits_for_any_more_is_aborted(proxy, engine):
    engine.script.append(slow(engine, 30))
    _, key = await proxy.open()
    first = asyncio.create_task(ask(proxy, key))

    async def asked() -> bool:
        return len(engine.asked) == 1

    await eventually(asked)
    retry = asyncio.create_task(ask(proxy, key, again=1))
    await asyncio.sleep(0.3)
    first.cancel()
    await asyncio.sleep(0.3)
    assert engine.aborted == 0
    retry.cancel()

    async def aborted() -> bool:
        return engine.aborted == 1

    await eventually(aborted, seconds=3)


async def test_who_leaves_while_the_store_is_silent_ends_the_sampling_all_the_same(proxy, engine, monkeypatch):
    async def silent(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(TraceStore, "awaited", silent)
    engine.script.append(slow(engine, 30))
    _, key = await proxy.open()
    asking = asyncio.create_task(ask(proxy, key))

    async def asked() -> bool:
        return len(engine.asked) == 1

    await eventually(asked)
    asking.cancel()

    async def aborted() -> bool:
        return engine.aborted == 1

    await eventually(aborted, seconds=2)


async def test_the_same_body_beside_a_connected_client_is_a_new_sample(proxy, engine):
    engine.script.append(slow(engine, 0.4))
    session, key = await proxy.open()
    replies = await asyncio.gather(*(ask(proxy, key) for _ in range(3)))
    assert len(set(replies)) == 3
    assert len(await proxy.store.load(session)) == 3


async def test_once_after_a_client_that_left_the_same_body_gets_what_it_missed(proxy, engine, monkeypatch):
    committing, go = asyncio.Event(), asyncio.Event()
    commit = TraceStore.commit

    async def held(store, session_id, call):
        committing.set()
        await go.wait()
        await commit(store, session_id, call)

    monkeypatch.setattr(TraceStore, "commit", held)
    session, key = await proxy.open()
    first = asyncio.create_task(ask(proxy, key))
    await committing.wait()
    first.cancel()
    await asyncio.sleep(0.05)
    second = asyncio.create_task(ask(proxy, key))
    await asyncio.sleep(0.05)
    go.set()
    assert await second == "reply 0"

    async def delivered() -> bool:
        return [record.delivered for record in await proxy.store.load(session)] == ["yes"]

    await eventually(delivered)
    assert len(engine.asked) == 1


async def test_after_a_failed_sending_the_same_body_is_a_new_sample(proxy, engine):
    session, key = await proxy.open()
    assert await ask(proxy, key) == "reply 0"
    engine.script.append(fails(400, "no"))
    with pytest.raises(KeyError):
        await ask(proxy, key)
    assert await ask(proxy, key, again=1) == "reply 1"
    assert len(await proxy.store.load(session)) == 2


async def test_any_replica_serves_any_call(proxy, engine, redis):
    async with running_proxy(engine, redis) as other:
        session, key = await proxy.open()
        for replica in (proxy, other, proxy, other):
            assert (await replica.chat(key))[0] == 200
        records = await proxy.store.load(session)
        assert [record.number for record in records] == [1, 2, 3, 4]
        assert [record.completion_ids.tolist() for record in records] == [each["ids"] for each in engine.sampled]


async def test_durable_before_delivered(proxy, engine, monkeypatch):
    """Until the commit has ended no byte of the reply has left; an agent that leaves meanwhile is marked."""
    committing, go = asyncio.Event(), asyncio.Event()
    commit = TraceStore.commit

    async def held(store, session_id, call):
        committing.set()
        await go.wait()
        await commit(store, session_id, call)

    monkeypatch.setattr(TraceStore, "commit", held)
    session, key = await proxy.open()
    asking = asyncio.create_task(proxy.chat(key))
    await committing.wait()
    await asyncio.sleep(0.1)
    assert not asking.done()
    asking.cancel()
    await asyncio.sleep(0.1)
    go.set()

    async def marked() -> bool:
        records = await proxy.store.load(session)
        return [record.delivered for record in records] == ["no"]

    await eventually(marked)
    assert (await proxy.admin.seal(session)).sealed.undelivered == 1


async def test_a_delivered_reply_is_marked_before_the_seal(proxy):
    session, key = await proxy.open()
    await proxy.chat(key)
    await proxy.admin.seal(session)
    assert [record.delivered for record in await proxy.store.load(session)] == ["yes"]


async def test_stopping_drains_calls_in_flight(engine, redis):
    engine.script.append(slow(engine, 0.5))
    async with running_proxy(engine, redis, retry_s=1.0) as proxy:
        _, key = await proxy.open()
        asking = asyncio.create_task(proxy.chat(key))

        async def asked() -> bool:
            return len(engine.asked) == 1

        await eventually(asked)
        proxy.stop.set()
        assert (await asking)[0] == 200
        with pytest.raises(OSError):
            await proxy.chat(key)


async def test_a_taken_port_is_named_before_anything_starts(proxy, engine, redis):
    port = int(proxy.url.rsplit(":", 1)[1])
    settings = Settings(proxy_port=port, admin_port=free_port(), engine_urls=[engine.url])
    with pytest.raises(InputError) as error:
        await serve(settings, redis, stop=asyncio.Event(), ready=asyncio.Event())
    assert error.value.cause == "port_occupied"
    assert str(port) in error.value.detail


async def test_a_call_that_could_not_be_committed_is_released_and_may_be_sent_again(proxy, engine, monkeypatch):
    commit, broken = TraceStore.commit, [True]

    async def breaks(store, session_id, call):
        if broken:
            broken.pop()
            raise RedisError("gone for a moment")
        await commit(store, session_id, call)

    monkeypatch.setattr(TraceStore, "commit", breaks)
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 503
    assert (await proxy.admin.read(session)).in_flight == 0
    assert await ask(proxy, key, again=1) == "reply 1"


async def test_a_release_that_fails_is_made_up_for(proxy, engine, monkeypatch):
    release, broken = TraceStore.release, [True]

    async def breaks(store, *arguments, **fields):
        if broken:
            broken.pop()
            raise RedisError("gone for a moment")
        await release(store, *arguments, **fields)

    monkeypatch.setattr(TraceStore, "release", breaks)
    engine.script.append(fails(400, "no"))
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 400

    async def released() -> bool:
        return (await proxy.admin.read(session)).in_flight == 0

    await eventually(released)


async def test_marks_that_could_not_be_written_are_kept(proxy, engine, monkeypatch):
    mark, broken = TraceStore.mark, [True]

    async def breaks(store, marks):
        if broken:
            broken.pop()
            raise RedisError("gone for a moment")
        await mark(store, marks)

    monkeypatch.setattr(TraceStore, "mark", breaks)
    session, key = await proxy.open()
    await proxy.chat(key)

    async def marked() -> bool:
        return [record.delivered for record in await proxy.store.load(session)] == ["yes"]

    await eventually(marked)


@pytest.mark.parametrize("lands", [True, False])
async def test_a_commit_that_is_cancelled_twice_ends_marked_or_released(engine, redis, monkeypatch, lands):
    committing, go = asyncio.Event(), asyncio.Event()
    commit = TraceStore.commit

    async def held(store, session_id, call):
        committing.set()
        await go.wait()
        if not lands:
            raise RedisError("gone for a moment")
        await commit(store, session_id, call)

    monkeypatch.setattr(TraceStore, "commit", held)
    store = TraceStore(redis)
    served, engines = Sessions(store), Engines([VllmSampler(engine.url)])
    await store.beat(served.replica, lease_s=60, sessions=())
    session = await served.find([await served.open(session_spec())])
    request = ChatDialect().parse(b'{"messages":[{"role":"user","content":"hi"}]}', "")
    calls = Calls(served, engines, Metrics())
    flight = Flight(session.spec.session_id, b"B", asyncio.current_task())
    calling = asyncio.create_task(calls.run(session, request, ChatDialect(), Sending(b"B"), flight))
    await committing.wait()
    for _ in range(2):
        calling.cancel()
        await asyncio.sleep(0.01)
    assert calling.cancelled()
    go.set()
    watching = [asyncio.create_task(served.watch()), asyncio.create_task(served.flush_marks())]

    async def settled() -> bool:
        delivered = [record.delivered for record in await store.load(session.spec.session_id)]
        return delivered == ["no"] if lands else (await store.read(session.spec.session_id)).in_flight == 0

    await eventually(settled)
    for task in watching:
        task.cancel()
    await engines.all[0].sampler.close()


async def test_a_reply_that_could_not_be_sent_is_marked(proxy, monkeypatch):
    monkeypatch.setattr(ChatDialect, "render", lambda *_: 1 / 0)
    session, key = await proxy.open()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with proxy.http.post(proxy.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}) as response:
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "internal_error"

    async def marked() -> bool:
        return [record.delivered for record in await proxy.store.load(session)] == ["no"]

    await eventually(marked)


async def test_once_a_retry_beside_another_client_gets_its_own_call(proxy, engine, redis):
    """Two clients with one body: the first leaves in mid-call and asks again elsewhere; it never gets the second's reply."""
    async with running_proxy(engine, redis) as other:
        engine.script += [slow(engine, 30), slow(engine, 1.0)]
        _, key = await proxy.open(budget=Budget(sampled_tokens=200_000))
        first = asyncio.create_task(ask(proxy, key))

        async def asked(number) -> bool:
            return len(engine.asked) == number

        await eventually(lambda: asked(1))
        second = asyncio.create_task(ask(other, key))
        await eventually(lambda: asked(2))
        first.cancel()

        async def aborted() -> bool:
            return engine.aborted == 1

        await eventually(aborted)
        retried = await ask(other, key, again=1)
        assert {retried, await second} == {"reply 0", "reply 1"}
        assert retried != await second


async def test_once_a_retry_whose_first_sending_was_lost_is_a_new_sample(proxy, engine):
    session, key = await proxy.open()
    assert await ask(proxy, key) == "reply 0"
    assert await ask(proxy, key, content="on") == "reply 1"

    async def marked() -> bool:
        return [record.delivered for record in await proxy.store.load(session)] == ["yes", "yes"]

    await eventually(marked)  # a retry that has to wait for a reply's mark is a retry of that
    assert await ask(proxy, key, again=1) == "reply 2"


async def test_infra_is_not_a_grade_where_redis_lost_the_session(proxy, engine, redis):
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    await redis.flushall()
    status, reply = await proxy.chat(key)
    assert (status, reply["error"]["code"]) == (401, "invalid_api_key"), "which no agent asks again after"
    for what in (proxy.admin.read, proxy.admin.seal):
        with pytest.raises(InfraError) as lost:
            await what(session)
        assert lost.value.cause == "session_lost"


async def test_infra_is_not_a_grade_where_redis_may_have_lost_calls(proxy, engine, redis):
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    await redis.hset(f"evener:session:{session}", "server", "another")
    status, reply = await proxy.chat(key)
    assert (status, reply["error"]["code"]) == (403, "session_lost")
    state = await proxy.admin.seal(session)
    assert classify(Ending(exit_code=0, state=state)).cause == "session_lost"
    assert classify(Ending(exit_code=0, state=state)).outcome == "infra_error"
