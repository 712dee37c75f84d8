"""A scored workspace leaves nothing behind once the ledger has read its score."""

import asyncio

from evener.api import Refused, ScoreOrder
from evener_verifier.heart import Hearts

ORDER = ScoreOrder(
    session_id="r.1",
    task_id="t",
    snapshot="s",
    agent_bundle="a",
    grader_bundle="g",
    trusted=True,
    sandbox="auto",
    again_s=0.03,
)


class Api:
    """Refuses once the score was read."""

    def __init__(self):
        self.read = False
        self.beats = 0

    async def scoring(self, session, *, begins):
        self.beats += not begins
        if self.read:
            raise Refused(session)
        return ORDER


async def test_no_timer_outlives_the_last_beat(monkeypatch):
    """A timer would keep its task and order for ten minutes, whatever the rate."""
    loop, timers = asyncio.get_running_loop(), []
    later = loop.call_later
    api = Api()
    hearts = Hearts(api)
    monkeypatch.setattr(loop, "call_later", lambda *args, **more: timers.append(later(*args, **more)) or timers[-1])
    async with hearts.beating(ORDER):
        pass
    monkeypatch.undo()
    assert len(timers) == 1
    beats = api.beats
    api.read = True
    async with asyncio.timeout(20):
        while not timers[0].cancelled():
            await asyncio.sleep(0.01)
    assert api.beats == beats + 1
    await hearts.stop()
