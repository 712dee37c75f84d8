"""The programs behind the targets of the Makefile, which no test imports, can be imported."""

import importlib

import pytest


@pytest.mark.parametrize("name", ["tests.chaos", "tests.harnesses", "tests.tamper", "tests.vllm", "bench.proxy", "bench.load"])
def test_it_can_be_imported(name: str):
    assert importlib.import_module(f"{name}.__main__").main


@pytest.mark.parametrize("groups", [12, 40, 268])
def test_a_chaos_run_has_as_many_groups_of_pi_as_it_says(groups: int):
    chaos = importlib.import_module("tests.chaos.__main__")
    harnesses = [chaos.runfile.Harness(name=name, weight=weight) for name, weight in (("quick", 9), ("pi", 1))]
    seed = chaos.a_seed(1, groups)
    names = [chaos.pick_harness(number, seed=seed, harnesses=harnesses).name for number in range(groups)]
    assert names.count("pi") == groups // chaos.PI
