"""``make test-vllm``: install vLLM and the agents, then hold the contract to the CPU engine and to vLLM; pytest's exit code."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from evener.settings import load
from tests.harnesses.agents import install_agent
from tests.vllm import install
from tests.vllm.process import VLLM
from tests.vllm.test_agents import AGENTS
from tests.vllm.test_human_eval import HUMAN_EVAL, SMOLLM2

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run it."""
    os.chdir(ROOT)
    cache = load().cache.absolute()
    installed = install.ensure(cache)
    for agent in AGENTS:
        asyncio.run(install_agent(agent, cache, lambda step: print(step, flush=True)))
    os.environ |= {VLLM: str(installed.python), SMOLLM2: str(installed.smollm2), HUMAN_EVAL: str(installed.human_eval)}
    return int(pytest.main(["tests/vllm", "--durations=15", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
