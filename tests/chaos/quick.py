"""A harness of tests alone: a Python script that makes a few calls, leaves a number as its answer, and ends.

It asks again as agents' SDKs do. Registered by the process that runs it (`command`), never by Evener.
"""

import json

from evener_runner.harnesses import HARNESSES, Access, Harness

AGENT = r"""
import json, os, random, sys, time, urllib.error, urllib.request

access = json.load(open(os.path.expanduser("~/.agent.json")))

def call(messages):
    body = json.dumps({"model": access["model"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + access["key"], "Content-Type": "application/json"}
    for number in range(12):
        headers["x-stainless-retry-count"] = str(number)
        request = urllib.request.Request(access["base_url"] + "/v1/chat/completions", data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=100) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
        except (OSError, ValueError):
            pass
        time.sleep(min(4.0, 0.5 * 2 ** number) * random.uniform(0.5, 1.0))
    raise SystemExit("no answer")

messages = [{"role": "user", "content": sys.stdin.read()}]
for turn in range(random.randint(2, 4)):
    messages += [{"role": "assistant", "content": call(messages)}, {"role": "user", "content": f"turn {turn}"}]
    time.sleep(random.uniform(0.0, 0.3))
open("answer", "w").write(repr(random.random()))
"""


def _files(access: Access) -> dict[str, bytes]:
    return {".agent.json": json.dumps({"base_url": access.base_url, "key": access.key, "model": access.model}).encode()}


QUICK = Harness(
    name="quick",
    dialect="chat",
    package="none",
    version="1",
    profiles=("default",),
    files=_files,
    env={},
    argv=lambda profile, access: ["/usr/bin/python3", "-c", AGENT],
)


def register() -> None:
    """Let this process's runner know the harness."""
    HARNESSES[QUICK.name] = QUICK
