"""Ports for what tests start, below those that the kernel gives to outgoing connections, which would take one in between.

Found by the system's own randomness: hypothesis seeds Python's, and two workers of pytest would draw the same.
"""

import random
import socket

FIRST, LAST = 15000, 32000
TRIES = 100
_draw = random.SystemRandom()


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many of them, all different."""
    probes: list[socket.socket] = []
    try:
        for _ in range(TRIES * count):
            if len(probes) == count:
                break
            probe = socket.socket()
            try:
                probe.bind(("127.0.0.1", _draw.randrange(FIRST, LAST)))
            except OSError:
                probe.close()
            else:
                probes.append(probe)
        assert len(probes) == count, f"no {count} ports are free between {FIRST} and {LAST}"
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
