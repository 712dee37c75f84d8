# Each target sets up what it needs; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test test-fast test-whole test-chaos test-stack test-harnesses test-tamper test-vllm bench-proxy bench-trace bench-load lint wheel clean

V := .venv/bin
export TOKENIZERS_PARALLELISM := false

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: ## make .venv and install what the embedded stack needs
	@scripts/setup.sh all

setup-dev:
	@scripts/setup.sh dev

demo: setup ## the whole loop on this machine: evaluate, train, evaluate again
	@$(V)/python scripts/demo.py $(DEMO)

# Each worker starts services of its own; those of the environment are one set for all tests.
WORKERS := $(if $(EVENER_TEST_AMQP_URL)$(EVENER_TEST_REDIS_URL)$(EVENER_TEST_DATABASE_URL),0,2)

# Whole runs: with the real agent, on two processes of each service, and ended at every point where one can end.
PROCESSES := tests/e2e/test_processes.py
WHOLE := $(filter-out $(PROCESSES),$(wildcard tests/e2e/test_*.py)) tests/integration/test_crash_points.py \
	tests/integration/test_messages_go_astray.py tests/unit/learner/test_takeover.py

# Files in their order and not by their number of tests: the slow ones come first, so that no worker ends long after the others.
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Threads of torch that wait for one another by spinning slow down all workers.
test test-fast test-whole: export OMP_NUM_THREADS := 1

test: setup-dev ## all tests but those of the other targets
	@$(V)/python -m pytest $(SPREAD) $(addprefix --ignore=,$(PROCESSES) $(WHOLE)) $(PYTEST)

test-whole: setup-dev ## whole runs, stopped, cut and killed, with the real agent and on two processes of each service
	@$(V)/python -m pytest $(PROCESSES) $(PYTEST)
	@$(V)/python -m pytest $(SPREAD) $(WHOLE) $(PYTEST)

test-fast: setup-dev ## unit and contract tests on fakes
	@$(V)/python -m pytest tests/unit tests/contract -m "not e2e" $(PYTEST)

test-chaos: setup-dev ## a run while every kind of process is killed in turn: KILLS=10 SEED= STEPS=10
	@$(V)/evener harnesses install pi
	@KILLS=$(KILLS) SEED=$(SEED) STEPS=$(STEPS) $(V)/python -m tests.chaos

test-stack: ## the whole stack in containers, scaled and restarted amid a run (needs Docker)
	@scripts/test_stack.sh

test-harnesses: setup-dev ## unmodified agents through the proxy against a scripted engine (HARNESSES="pi codex": only these; SLOW_S=600: seconds of a slow reply)
	@$(V)/python -m tests.harnesses $(PYTEST)

test-tamper: setup-dev ## attacks on a score, as real workspaces, against both tiers of the verifier (ONLY=part-of-a-name)
	@ONLY="$(ONLY)" $(V)/python -m tests.tamper $(TAMPER)

test-vllm: setup-dev ## the engine's contract, two agents and HumanEval on real vLLM for the CPU (installs 3.5 GB)
	@$(V)/python -m tests.vllm $(PYTEST)

bench-proxy: setup ## the proxy's cost beside OpenEnv's capture proxy, in one run (needs redis-server)
	@$(V)/python -m bench.proxy $(BENCH)

bench-trace: setup ## what a trace costs: time to training rows, bytes a captured turn, tokens that a chain spares
	@$(V)/python -m bench.trace $(BENCH)

bench-load: setup-dev ## scripted rollouts on real stores and services: LOAD="--rollouts 10000" (docs/durability.md)
	@$(V)/python -m bench.load $(LOAD)

lint: setup-dev ## ruff, pyright, import-linter, deptry
	@$(V)/ruff check .
	@$(V)/ruff format --check .
	@$(V)/pyright --pythonpath $(V)/python
	@$(V)/lint-imports
	@$(V)/deptry .
	@mkdir -p .out && echo '{"ok": true}' > .out/lint.json && echo "lint: ok"

wheel: ## build the wheel into dist/
	@$(V)/pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove what the targets made, but no run's state (.evener)
	rm -rf .venv .out dist .pytest_cache .ruff_cache
