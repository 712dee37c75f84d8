"""How long a health check waits, seen from a process of its own: ``python -m bench.proxy.probe PORT PATH SECONDS``.

Prints the waits in milliseconds as JSON.
"""

import http.client
import json
import sys
import time

EVERY_S = 0.02
LONGEST_S = 30.0


def main(port: int, path: str, seconds: float) -> None:
    """Ask over one connection, one check at a time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
    waits: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        connection.request("GET", path)
        connection.getresponse().read()
        waits.append(1000 * (time.perf_counter() - began))
        time.sleep(EVERY_S)
    print(json.dumps(waits))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
