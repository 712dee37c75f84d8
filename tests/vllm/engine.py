"""A running engine as its tests see it: the ports of proxy and learner, what is asked through them, and what must come back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from evener.engines.sampler import Sample, SampleRequest, neutral_request
from evener.engines.vllm import VllmSampler
from evener.engines.weights import DiskWeightSink, replace_weights
from tests.vllm import reference
from tests.vllm.policies import BASH, calls_a_tool, random_policy, teach, tokenizer_of
from tests.vllm.process import MODEL, EngineProcess

CONTEXT = 4096
TOLERANCE = 1e-3
ASKED = {"role": "user", "content": "list the files"}


class Policies:
    """The contract's policies, each made when it is first asked for. Those of one kind have the same layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of([str(message) for each in calls_a_tool() for message in each.messages] * 3)

    def random(self, seed: int, kind: Literal["qwen3", "llama"] = "qwen3") -> Path:
        """A random one: ``qwen3`` ties its head to its embedding, ``llama`` does not."""
        folder = self._folder / f"{kind}-{seed}"
        return folder if folder.is_dir() else random_policy(folder, self._tokenizer, seed=seed, kind=kind, context=CONTEXT)

    @cached_property
    def taught(self) -> Path:
        """A Qwen3 that calls ``bash`` for whatever it is asked, and ends after the result."""
        start = random_policy(self._folder / "untaught", self._tokenizer, seed=1, spread=0.05, context=CONTEXT)
        return teach(start, calls_a_tool(), self._folder / "taught", steps=300)


@dataclass(frozen=True)
class Engine:
    """A running engine, and our own ways into it: the proxy's port, the learner's port, and plain HTTP."""

    process: EngineProcess
    sampler: VllmSampler
    sink: DiskWeightSink
    http: aiohttp.ClientSession

    @property
    def is_vllm(self) -> bool:
        """What is asked of vLLM by other routes than of the CPU engine."""
        return self.process.kind == "vllm"

    async def serve(self, policy: Path, version: int) -> None:
        """Publish a policy as the learner does."""
        await replace_weights(self.sink, policy, version)

    async def post(self, path: str, body: Any = None) -> Any:
        """The document that a route answers."""
        async with self.http.post(self.process.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()


@asynccontextmanager
async def connected(process: EngineProcess) -> AsyncIterator[Engine]:
    """Clients of an engine."""
    sampler = VllmSampler(process.url)
    timeout = aiohttp.ClientTimeout(total=120)
    async with DiskWeightSink(process.url) as sink, aiohttp.ClientSession(timeout=timeout) as http:
        yield Engine(process, sampler, sink, http)
    await sampler.close()


def ask(*messages: dict[str, Any], temperature: float = 1.0, max_tokens: int = 24) -> SampleRequest:
    """A request for the policy's own distribution, with a tool."""
    raw = [msgspec.Raw(msgspec.json.encode(message)) for message in messages or (ASKED,)]
    request = neutral_request(MODEL, raw, temperature)
    request.max_tokens = max_tokens
    request.tools = msgspec.Raw(msgspec.json.encode([BASH]))
    return request


def check_exact(policy: Path, sample: Sample, **sampling: Any) -> None:
    """The sample is whole, and its log-probabilities are the reference's. ``sampling``: see `reference.logprobs`."""
    assert (sample.level, sample.flaw) == ("tokens", None)
    assert len(sample.completion_ids) == len(sample.logprobs) == sample.completion_tokens > 0
    check_close(policy, sample.prompt_ids, sample.completion_ids, sample.logprobs, **sampling)


def check_close(policy: Path, prompt: Any, ids: Any, logprobs: Any, **sampling: Any) -> None:
    """The log-probabilities are the reference's."""
    expected = reference.logprobs(policy, prompt, ids, **sampling)
    np.testing.assert_allclose(np.asarray(logprobs), expected, atol=TOLERANCE, rtol=0)
