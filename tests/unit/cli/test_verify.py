"""`evener rollouts verify` says the largest difference between what was recorded and what an engine says now, and its place."""

import contextlib
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pytest
from msgspec import to_builtins

from evener.cli import verify
from evener.errors import InputError
from evener.settings import Settings
from tests.unit.trace.sessions import rows_of
from tests.unit.trace.test_record import make

USED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


class Engine(BaseHTTPRequestHandler):
    """Says that a token's log-probability is minus its id over 100; serves version 2."""

    def do_GET(self):
        self.say({"data": [{"id": "policy"}]} if self.path == "/v1/models" else {"weight_version": "2"})

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        scored = [{str(token): {"logprob": -token / 100, "rank": 1, "decoded_token": ""}} for token in prompt[1:]]
        self.say({"choices": [{"prompt_logprobs": [None, *scored]}]})

    def say(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    server = HTTPServer(("127.0.0.1", 0), Engine)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def a_rollout(*, off=0.0, used=USED):
    """Two calls in one row, of versions 1 and 2; the last log-probability is ``off`` from the engine's."""
    first = make(1, np.array([5]), np.array([10, 20]), logprobs=np.array([-0.1, -0.2], np.float32), request={"used": used})
    second = make(
        2,
        np.array([5, 10, 20, 6]),
        np.array([30, 40]),
        logprobs=np.array([-0.3, -0.4 - off], np.float32),
        versions=np.full(2, 2, np.int32),
        request={"used": used},
    )
    return [first, second]


@pytest.fixture
def ask(monkeypatch, engine, tmp_path):
    """`verify` of a rollout with these calls."""

    async def ask(calls):
        sequences = [
            {
                "ids": row.input_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "versions": row.versions.tolist(),
                "provenance": to_builtins(row.provenance),
            }
            for row in rows_of(calls)
        ]
        documents = {
            "/v1/rollouts/latest/sequences": {"rollout_id": "o", "session_id": "o.1", "sequences": sequences},
            "/v1/rollouts/o": {"run_id": "r"},
            "/v1/runs/r": {"policy": "p"},
        }

        class Api:
            async def get(self, path):
                return documents[path]

        @contextlib.asynccontextmanager
        async def connect(_):
            yield Api()

        monkeypatch.setattr(verify, "connect", connect)
        return await verify.verify(Settings(data=tmp_path), "latest", engine=engine)

    return ask


async def test_what_the_engine_says_again_holds(ask):
    found = await ask(a_rollout())
    assert found["holds"]
    assert found["largest_difference"] < 1e-6
    assert (found["scored"], found["not_scored"]) == (2, 2)  # the engine serves version 2, the first call was version 1's
    verify.show(found)


async def test_the_largest_difference_is_named_with_its_place(ask):
    found = await ask(a_rollout(off=0.05))
    assert not found["holds"]
    assert found["largest_difference"] == pytest.approx(0.05, abs=1e-6)
    place = found["at"]
    assert (place["sequence"], place["position"], place["token_id"], place["version"]) == (0, 5, 40, 2)
    assert (place["recorded"], place["scored"]) == (pytest.approx(-0.45), pytest.approx(-0.4))


async def test_what_cannot_be_scored_is_refused(ask):
    with pytest.raises(InputError, match=r"temperature 0\.7"):
        await ask(a_rollout(used=USED | {"temperature": 0.7}))
    with pytest.raises(InputError, match="no sequence"):
        await ask([])
    with pytest.raises(InputError, match="serves version 2"):
        await ask(a_rollout()[:1])
