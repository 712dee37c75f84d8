"""Which engine a call goes to: the session's own while that is fit, the next one when it fails."""

import pytest

from evener.engines.sampler import EngineStatus, EngineUnavailable
from evener_proxy.engines import Engine, Engines
from tests.unit.proxy.stub import StubEngine, eventually, fails, running_proxy, serving, session_spec

SESSIONS = [session_spec() for _ in range(300)]


class Named:
    """A sampler that says what it serves."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version

    async def status(self) -> EngineStatus:
        return EngineStatus(model="tiny", window=None, version=self.version)


async def engines(**versions: int) -> Engines:
    """Engines that have been asked once."""
    made = Engines([Named(name, version) for name, version in versions.items()])
    for engine in made.all:
        await engine.refresh()
    return made


async def chosen(found: Engines, spec, attempt=0) -> str:
    engine, _ = await found.pick(spec, attempt=attempt)
    return engine.sampler.name


def named(found: Engines, name: str) -> Engine:
    return next(engine for engine in found.all if engine.sampler.name == name)


async def test_a_session_keeps_its_engine_and_sessions_are_spread():
    four = await engines(a=0, b=0, c=0, d=0)
    own = [await chosen(four, spec) for spec in SESSIONS]
    assert own == [await chosen(four, spec) for spec in SESSIONS]
    backwards = await engines(d=0, c=0, b=0, a=0)
    assert own == [await chosen(backwards, spec) for spec in SESSIONS]
    assert min(own.count(name) for name in "abcd") > 40


async def test_an_engine_that_goes_moves_only_its_own_sessions():
    four, three = await engines(a=0, b=0, c=0, d=0), await engines(a=0, b=0, d=0)
    moved = [(await chosen(four, spec), await chosen(three, spec)) for spec in SESSIONS]
    assert {before for before, after in moved if before != after} == {"c"}
    assert {after for before, after in moved if before == "c"} == {"a", "b", "d"}
    named(four, "c").problem = "gone"
    assert [await chosen(four, spec) for spec in SESSIONS] == [after for _, after in moved]


async def test_a_call_that_failed_goes_to_each_other_engine_before_it_comes_back():
    three = await engines(a=0, b=0, c=0)
    tried = [await chosen(three, SESSIONS[0], attempt) for attempt in range(6)]
    assert sorted(tried[:3]) == ["a", "b", "c"]
    assert tried[3:] == tried[:3]


async def test_bounded_staleness_an_engine_with_old_weights_comes_last_and_gets_nothing():
    mixed = await engines(new=5, old=2)
    spec = session_spec(oldest_version=4)
    assert {await chosen(mixed, session_spec(oldest_version=4)) for _ in range(50)} == {"new"}
    with pytest.raises(EngineUnavailable, match="waits for the policy's weights"):
        await mixed.pick(spec, attempt=1)
    named(mixed, "old").sampler.version = 5
    assert await chosen(mixed, spec, attempt=1) == "old", "it is asked anew, and has them now"


async def test_a_pinned_session_goes_to_the_engine_of_its_version():
    mixed = await engines(three=3, four=4)
    for version, name in ((3, "three"), (4, "four")):
        assert {await chosen(mixed, session_spec(version=version)) for _ in range(50)} == {name}


async def test_an_engine_that_fails_is_passed_over_within_the_call(engine, redis):
    other = StubEngine()
    async with serving(other), running_proxy(engine, redis, others=[other]) as proxy:

        async def both_answer() -> bool:
            async with proxy.http.get(proxy.admin_url + "/readyz") as response:
                return set((await response.json())["capture_levels"].values()) == {"tokens"}

        await eventually(both_answer)
        session, key = await proxy.open()
        assert (await proxy.chat(key))[0] == 200
        own, spare = (engine, other) if engine.asked else (other, engine)
        own.script.append(fails(500))
        assert (await proxy.chat(key, [{"role": "user", "content": "again"}]))[0] == 200
        assert (len(own.asked), len(spare.asked)) == (2, 1)
        assert [record.engine for record in await proxy.store.load(session)] == [own.url, spare.url]
