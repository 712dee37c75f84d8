"""Policies, and an engine of each kind that this run of the tests has: the CPU engine always, vLLM under ``make test-vllm``."""

import os
from collections.abc import Iterator

import pytest

from tests.vllm.engine import Policies
from tests.vllm.process import VLLM, EngineProcess, engines, running

Factory = pytest.TempPathFactory
collect_ignore = [] if VLLM in os.environ else ["test_agents.py", "test_human_eval.py"]
"""What only real vLLM can do."""


@pytest.fixture(scope="session")
def policies(tmp_path_factory: Factory) -> Policies:
    import torch

    torch.set_num_threads(1)
    return Policies(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module", params=engines())
def tied(request: pytest.FixtureRequest, policies: Policies, tmp_path_factory: Factory) -> Iterator[EngineProcess]:
    """An engine that was started with a random policy whose head is its embedding."""
    with running(request.param, policies.random(1), tmp_path_factory.mktemp("tied")) as process:
        yield process


@pytest.fixture(scope="module", params=engines())
def untied(request: pytest.FixtureRequest, policies: Policies, tmp_path_factory: Factory) -> Iterator[EngineProcess]:
    """The same with a head of its own."""
    with running(request.param, policies.random(1, "llama"), tmp_path_factory.mktemp("untied")) as process:
        yield process
