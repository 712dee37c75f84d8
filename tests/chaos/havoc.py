"""Which process is killed when, and which connections are cut, follows from the seed and from how far the run is.

Kinds of processes take turns, in an order that is shuffled each time round. A kill comes at a random moment after as many
rollouts have ended as its place among the kills says, so that all of them fall into the run however fast the machine is.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator

from tests.chaos.stack import Chaos
from tests.chaos.stores import start_again

STUCK_S = 420.0
"""No rollout has ended for so long: something waits that nobody ends. RabbitMQ alone takes a minute to start here."""

LATENCY_S = (0.05, 0.4)
SILENCE_S = (1.0, 12.0)
"""Shorter and longer than a heartbeat's answer is waited for."""


class Stuck(AssertionError):
    """The run does not go on."""


class Havoc:
    """Kills and cuts, counted."""

    def __init__(self, chaos: Chaos, *, seed: int, kills: int, rollouts: int) -> None:
        self._chaos = chaos
        self._random = random.Random(seed)
        self._kills = kills
        self._rollouts = rollouts
        self._timers: list[threading.Timer] = []
        self.kills = 0
        self.exits = 0
        self.cuts = 0

    def wreak(self) -> None:
        """Kill and cut until all kills are done. Raises Stuck."""
        turns = self._turns()
        for number in range(self._kills):
            self._until_ended(0.95 * self._rollouts * number / self._kills)
            time.sleep(self._random.uniform(0.0, 1.5))
            self._kill(next(turns))
            if number % 2:
                self._cut()
        for timer in self._timers:
            timer.join()

    def _turns(self) -> Iterator[str]:
        kinds = self._chaos.kinds
        while True:
            self._random.shuffle(kinds)
            yield from kinds

    def _until_ended(self, wanted: float) -> None:
        ended, since = -1, time.monotonic()
        while ended < wanted:
            now = self._chaos.run().get("rollouts", {}).get("done", 0)
            if now > ended:
                ended, since = now, time.monotonic()
            self.revive()
            if time.monotonic() - since > STUCK_S:
                raise Stuck(f"no rollout has ended for {STUCK_S:g} s; {ended} of {self._rollouts} have")
            time.sleep(0.2)

    def revive(self) -> None:
        """Start again what ended by itself."""
        for name in self._chaos.revive():
            say(f"{name} had ended by itself")
            self.exits += 1

    def _kill(self, kind: str) -> None:
        """Kill one process of a kind; it comes back a moment later."""
        pause = self._random.uniform(0.0, 2.0)
        store = self._chaos.stores.get(kind)
        if store is not None:
            assert store.process is not None
            store.process.kill()
            say(f"killed {kind}")
            time.sleep(pause)
            start_again(store)
        else:
            service = self._random.choice(self._chaos.services(kind))
            service.kill()
            say(f"killed {service.name}")
            time.sleep(pause)
            service.start()
        self.kills += 1

    def _cut(self) -> None:
        """Let connections fail in one of three ways."""
        name = self._random.choice(sorted(self._chaos.relays.by_name))
        how = self._random.choice(("reset", "latency", "half-open"))
        say(f"{how}: {name}")
        self.cuts += 1
        relays = self._chaos.relays
        if how == "reset":
            relays.cut(name)
        elif how == "latency":
            relays.delay(name, self._random.uniform(*LATENCY_S))
            self._later(self._random.uniform(2.0, 6.0), lambda: relays.delay(name, 0.0))
        else:
            relays.stall(name)
            self._later(self._random.uniform(*SILENCE_S), lambda: relays.cut(name))

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.start()
        self._timers.append(timer)


def say(text: str) -> None:
    """One line on the screen."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)
