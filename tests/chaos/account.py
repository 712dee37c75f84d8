"""After everything was killed: each rollout has one outcome, nothing is left, and proxy, ledger and learner agree."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.stack import Chaos
from tests.e2e.test_processes import left_in_queues, left_in_redis, rows

REST_S = 300.0
"""Longest until nothing is left: queues of a run that is over go after a minute or two, sandboxes of the dead after one."""

LAST = "attempts.rollout_id = rollouts.id AND attempts.number = rollouts.attempt"
TRAINED = "groups.id = rollouts.group_id AND groups.state = 'trained' AND rollouts.state = 'scored'"


def leftovers(chaos: Chaos) -> dict[str, Any]:
    """What is still somewhere although the run is over."""
    stack = chaos.stack
    found = {
        "attempts under way": one(chaos, "SELECT count(*) FROM attempts WHERE ended_at IS NULL"),
        "leases": one(chaos, "SELECT count(*) FROM attempts WHERE lease_expires_at IS NOT NULL"),
        "learner's lease": one(chaos, "SELECT count(*) FROM runs WHERE learner_expires_at > now()"),
        "sessions": one(chaos, "SELECT count(*) FROM attempts WHERE released_at IS NULL"),
        "outbox": one(chaos, "SELECT count(*) FROM outbox"),
        "redis": left_in_redis(stack),
        "messages": asyncio.run(left_in_queues(stack.amqp)),
        "sandboxes": [path.name for path in (stack.folder / "data" / "sandboxes").glob("*")],
    }
    return {name: left for name, left in found.items() if left}


def until_at_rest(chaos: Chaos) -> dict[str, Any]:
    """Wait until nothing is left; what is, when the time is over."""
    deadline = time.monotonic() + REST_S
    while (left := leftovers(chaos)) and time.monotonic() < deadline:
        time.sleep(2.0)
    return left


def account(chaos: Chaos) -> dict[str, Any]:
    """The figures of the run; those of `must_be_zero` are the verdict."""

    def ask(query: str) -> int:
        return one(chaos, query)

    outcomes = {row[0]: row[1] for row in rows(chaos.stack, "SELECT outcome, count(*) FROM rollouts GROUP BY 1")}
    return {
        "rollouts": ask("SELECT count(*) FROM rollouts"),
        "pi_rollouts": ask("SELECT count(*) FROM rollouts JOIN groups ON groups.id = group_id AND harness = 'pi'"),
        "attempts": ask("SELECT count(*) FROM attempts"),
        "lost": outcomes.get(None, 0),
        "infra_errors": outcomes.get("infra_error", 0),
        "duplicated": ask("SELECT count(*) FROM (SELECT 1 FROM scores GROUP BY rollout_id HAVING count(*) > 1) AS twice")
        + ask(
            "SELECT count(*) FROM attempts JOIN rollouts ON rollouts.id = rollout_id"
            " WHERE attempts.number < attempt AND attempts.outcome IN ('finished', 'budget', 'agent_error')"
        ),
        "trained_twice": ask("SELECT coalesce(sum(groups), 0) FROM steps")
        - ask("SELECT count(*) FROM groups WHERE state = 'trained'"),
        "outcomes": {str(name): number for name, number in outcomes.items()},
        "causes": dict(Counter(row[0] for row in rows(chaos.stack, "SELECT cause FROM attempts WHERE cause IS NOT NULL"))),
        "sums": sums(chaos),
    }


def sums(chaos: Chaos) -> dict[str, int]:
    """Differences between what two services say of the same thing; each must be 0."""
    sealed = "SELECT count(*) FROM attempts WHERE outcome IN ('finished', 'budget', 'agent_error') AND"
    of_ledger = (
        "SELECT coalesce(sum(trained_tokens), 0) FROM sequences, attempts, rollouts, groups"
        f" WHERE attempt_id = attempts.id AND {LAST} AND {TRAINED}"
    )
    of_learner = "SELECT coalesce(sum((metrics->>'{}')::float), 0)::bigint FROM steps"
    return {
        "proxy_ledger_calls": one(
            chaos,
            f"{sealed} (sealed->>'committed')::int <> (SELECT count(*) FROM calls WHERE attempt_id = attempts.id)",
        ),
        "engine_ledger_calls": engine_differs(chaos),
        "ledger_learner_tokens": one(chaos, of_ledger) - one(chaos, of_learner.format("trained_tokens")),
        "ledger_learner_rollouts": one(chaos, f"SELECT count(*) FROM rollouts, groups WHERE {TRAINED}")
        - one(chaos, of_learner.format("rollouts")),
    }


def engine_differs(chaos: Chaos) -> int:
    """Calls of the ledger that the engine did not answer just so, with that many tokens."""
    said: dict[str, set[int]] = {}
    for line in chaos.engine_record.read_text().splitlines():
        reply = json.loads(line)
        if reply["id"]:
            said.setdefault(reply["id"].rpartition("-")[0], set()).add(reply["tokens"])
    calls = rows(chaos.stack, "SELECT id, sampled_tokens FROM calls")
    return sum(tokens not in said.get(call, set()) for call, tokens in calls)


def one(chaos: Chaos, query: str) -> int:
    """The only value of a query."""
    return int(rows(chaos.stack, query)[0][0])


def processes_left(folder: Path) -> list[str]:
    """Processes of a sandbox below ``folder`` that are still there."""
    mark = str(folder / "data" / "sandboxes").encode()
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes()
        except OSError:
            continue
        if mark in text:
            found.append(text.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found
