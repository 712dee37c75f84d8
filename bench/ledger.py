"""A ledger of any size for measurements: rollouts whose calls form a line, with tokens and log-probabilities drawn at random.

Used by `bench/sql.py` and `bench/archive.py`, which need ``PYTHONPATH=.:services/orchestrator``.
"""

import re
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import asyncpg
import numpy as np

from evener.errors import Outcome
from evener_orchestrator.archive import runs_of
from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.copy import copy
from evener_orchestrator.ledger.models import Attempt, Call, Group, PolicyVersion, Rollout, Run, Sequence, Step, Task
from evener_orchestrator.states import GroupState, RolloutState, RunState, VersionState

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)
HARNESSES = ("pi", "codex", "claude-code", "opencode")
TASKS, SIZE, CALLS, CONTEXT, SAMPLED, VERSIONS = 200, 8, 10, 380, 120, 40
"""Rollouts have 10 calls with 380 tokens of context and 120 sampled tokens each: sequences of 5,000 tokens."""

POOL = np.random.default_rng(0)
IDS = POOL.integers(0, 150_000, 1_000_000, dtype=np.int32)
LOGPROBS = -POOL.exponential(0.3, 1_000_000).astype(np.float32)
REQUEST = {"system_digests": ["s"], "messages": [{"role": "tool", "content": "x" * 800}], "messages_base": 0}
FORKS = (None, None, None, None, None, None, None, "retokenised", "retry", "history_edited")
FAULTS = ("lease_expired", "calls_lost", "sandbox_failed")


def a_slice(pool: np.ndarray, start: int, length: int) -> np.ndarray:
    """``length`` neighbours of a pool."""
    start %= len(pool) - length
    return pool[start : start + length]


def archive(attempt: str, number: int, version: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one attempt: its calls and its one sequence."""
    calls, ids, logprobs, spans = [], [], [], []
    for place in range(CALLS):
        context, sampled = (
            a_slice(IDS, number * 7919 + place * 500 + part * CONTEXT, n) for part, n in enumerate((CONTEXT, SAMPLED))
        )
        chances = a_slice(LOGPROBS, number * 104_729 + place * 500, SAMPLED)
        key, tool = f"{attempt}-{place + 1}", place < CALLS - 1
        calls.append(
            {
                "id": key,
                "attempt_id": attempt,
                "number": place + 1,
                "parent_id": f"{attempt}-{place}" if place else None,
                "call_class": "agent",
                "fork": FORKS[number % len(FORKS)] if place == CALLS - 1 else None,
                "prompt_tokens": 500 * place + CONTEXT,
                "sampled_tokens": SAMPLED,
                "logprob_sum": float(chances.sum(dtype=np.float64)),
                "tools": int(tool),
                "context_ids": context,
                "completion_ids": sampled,
                "logprobs": chances,
                "version_runs": [[0, SAMPLED, version]],
                "version_dispatch": version,
                "version_completion": version,
                "request": REQUEST,
                "reply": {
                    "content": "y" * 200,
                    "tool_calls": [{"name": "bash", "arguments": '{"command": "ls"}'}] if tool else [],
                },
                "dialect": "chat",
                "delivered": "yes",
                "level": "tokens",
                "engine": "http://engine",
                "started_at": START,
                "ended_at": START,
            }
        )
        ids += [context, sampled]
        logprobs += [np.zeros(CONTEXT, np.float32), chances]
        at = 500 * place
        spans += [
            {"start": at, "end": at + CONTEXT, "call_id": key, "kind": "prompt"},
            {"start": at + CONTEXT, "end": at + 500, "call_id": key, "kind": "sampled"},
        ]
    mask = np.tile(np.repeat([0, 1], [CONTEXT, SAMPLED]), CALLS)
    masked = [[start, end] for start, end, value in runs_of(mask) if value]
    sequence = {
        "id": f"{attempt}-{CALLS}",
        "attempt_id": attempt,
        "number": 0,
        "tokens": 500 * CALLS,
        "token_ids": np.concatenate(ids),
        "logprobs": np.concatenate(logprobs),
        "mask_runs": masked,
        "version_runs": [[start, end, version] for start, end in masked],
        "spans": spans,
        "trained_tokens": SAMPLED * CALLS,
        "provenance": {},
        "digest": "0" * 64,
    }
    return calls, sequence


async def head(tx: Transaction) -> None:
    """The run, its tasks and its steps."""
    file = {"budget": {"sampled_tokens": 4096}}
    tx.session.add(
        Run(
            id="run", name="bench", kind="train", state=RunState.DONE, policy="bench", file=file, trusted=True, created_at=START
        )
    )
    tx.session.add_all(
        Task(digest=f"t{n}", task_id=f"task-{n}", family=f"f{n % 8}", agent_bundle="", grader_bundle="", created_at=START)
        for n in range(TASKS)
    )
    await tx.session.flush()
    for version in range(1, VERSIONS + 1):
        given = {"state": VersionState.PUBLISHED, "epoch": 1, "step": version - 1, "allotted_at": START}
        tx.session.add(PolicyVersion(policy="bench", version=version, **given))
        measured = {"staleness_mean": 0.5, "staleness_max": 1, "metrics": {}, "seconds": 1.0, "created_at": START}
        tx.session.add(Step(run_id="run", step=version, epoch=1, version=version + 1, groups=8, **measured))


def groups(rollouts: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]]:
    """Groups with their rollouts and attempts; one group in four is an evaluation, one attempt in 20 fails for us."""
    for number in range(rollouts // SIZE):
        evaluation, step = number % 4 == 0, number * VERSIONS // (rollouts // SIZE) + 1
        group = {
            "id": f"g{number:07}",
            "run_id": "run",
            "task_digest": f"t{number % TASKS}",
            "harness": HARNESSES[number // TASKS % len(HARNESSES)],
            "profile": "default",
            "purpose": "eval" if evaluation else "train",
            "version": (1 if step <= VERSIONS // 2 else VERSIONS // 2 + 1) if evaluation else None,
            "number": number,
            "size": SIZE,
            "state": GroupState.CLOSED if evaluation else GroupState.TRAINED,
            "reason": "",
            "step": None if evaluation else step,
            "created_at": START,
        }
        members = [a_rollout(group, place, number * SIZE + place, step) for place in range(SIZE)]
        yield group, [rollout for rollout, _ in members], [attempt for _, some in members for attempt in some]


def a_rollout(group: dict[str, Any], place: int, number: int, version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A scored rollout and its attempts."""
    key, failed = f"o{number:08}", number % 20 == 0
    score = float((number * 2_654_435_761) % 97 < 40 + version)
    rollout = {
        "id": key,
        "run_id": "run",
        "group_id": group["id"],
        "number": place,
        "state": RolloutState.SCORED,
        "attempt": 2 if failed else 1,
        "outcome": Outcome.FINISHED,
        "detail": "",
        "score": score,
        "reward": score,
        "calls": CALLS,
        "sampled_tokens": CALLS * SAMPLED,
        "version_min": version,
        "version_max": version,
        "scorings": 0,
        "created_at": START + timedelta(seconds=number),
    }
    common = {"rollout_id": key, "detail": "", "sandbox": "bubblewrap", "harness_version": "1", "created_at": START}
    attempts = [
        common | {"id": f"{key}.{n}", "number": n, "outcome": Outcome.INFRA_ERROR, "cause": FAULTS[number % 3]} for n in (1,)
    ] * failed
    last = {"id": f"{key}.{rollout['attempt']}", "number": rollout["attempt"], "outcome": Outcome.FINISHED, "cause": None}
    return rollout, [*attempts, common | last]


async def fill(ledger: Ledger, rollouts: int, *, batch: int = 25) -> float:
    """Write a whole ledger on Postgres; the seconds it took."""
    began = time.perf_counter()
    await ledger.write(head)
    waiting: list[Any] = []
    for each in groups(rollouts):
        waiting.append(each)
        if len(waiting) == batch:
            await ledger.write(partial(_write, some=waiting))
            waiting = []
    if waiting:
        await ledger.write(partial(_write, some=waiting))
    return time.perf_counter() - began


async def _write(tx: Transaction, some: list[Any]) -> None:
    connection = await tx.session.connection()
    rollouts = [rollout for _, members, _ in some for rollout in members]
    await copy(connection, Group, [group for group, _, _ in some])
    await copy(connection, Rollout, rollouts)
    await copy(connection, Attempt, [attempt for _, _, attempts in some for attempt in attempts])
    for rollout in rollouts:
        calls, sequence = archive(f"{rollout['id']}.{rollout['attempt']}", int(rollout["id"][1:]), rollout["version_min"])
        await copy(connection, Call, calls)
        await copy(connection, Sequence, [sequence])


async def with_database(url: str, work: Callable[[str], Awaitable[T]]) -> T:
    """Do ``work`` in a database of its own, dropped afterwards."""
    admin = await asyncpg.connect(url.replace("+asyncpg", ""))
    await admin.execute("DROP DATABASE IF EXISTS evener_bench WITH (FORCE)")
    await admin.execute("CREATE DATABASE evener_bench TEMPLATE template0")
    try:
        return await work(re.sub(r"/[^/]*$", "/evener_bench", url))
    finally:
        await admin.execute("DROP DATABASE evener_bench WITH (FORCE)")
        await admin.close()
