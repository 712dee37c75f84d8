"""A small run whose every number can be counted by hand: the answers in docs/sql.md come from it.

Two tasks (`rename`, `count`) under two harnesses (`pi`, `codex`); evaluations of versions 1 and 3, two steps between. A call
samples four tokens, each with the log-probability of its version; all calls of a rollout but the last call one tool.
"""

from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import numpy as np

from evener.errors import Outcome
from evener.messages import Sealed
from evener.trace.record import CallRecord
from evener_orchestrator.archive import Archiver
from evener_orchestrator.ledger.models import Attempt, Rollout, Step
from evener_orchestrator.ledger.traces import store
from evener_orchestrator.states import GroupState, RolloutState, RunState
from tests.unit.orchestrator.rows import NOW, a_group, a_run, a_task
from tests.unit.orchestrator.world import FakeTrace

Message = dict[str, Any]

BUDGET = 16
LOGPROB = {1: -1.0, 2: -0.5, 3: -0.25}
CALLS = {"pi": 2, "codex": 3}


@dataclass(frozen=True)
class Row:
    """A rollout: what became of it, after which faults, and a call that forked (its cause)."""

    group: str
    task: str
    harness: str
    score: float | None
    version: int = 1
    faults: tuple[str, ...] = ()
    fork: str | None = None
    outcome: Outcome = Outcome.FINISHED


ROLLOUTS = [
    # version 1 before training
    Row("e1", "rename", "pi", 1.0, fork="subagent"),
    Row("e1", "rename", "pi", 1.0),
    Row("e2", "rename", "codex", 0.0, fork="retokenised"),
    Row("e2", "rename", "codex", 0.0, fork="retokenised"),
    Row("e3", "count", "pi", 1.0),
    Row("e3", "count", "pi", 0.0, fork="retry"),
    Row("e4", "count", "codex", 1.0),
    Row("e4", "count", "codex", 1.0),
    # step 1
    Row("t1", "rename", "pi", 1.0),
    Row("t1", "rename", "pi", 0.0, faults=("calls_lost",)),
    Row("t2", "count", "codex", 0.0),
    Row("t2", "count", "codex", 1.0),
    # no variance: skipped
    Row("t3", "rename", "codex", 0.0),
    Row("t3", "rename", "codex", 0.0, outcome=Outcome.BUDGET, fork="history_edited"),
    Row("t4", "count", "codex", 1.0),
    Row("t4", "count", "codex", 1.0),
    # step 2
    Row("t5", "count", "pi", 1.0),
    Row("t5", "count", "pi", 0.0),
    Row("t6", "rename", "codex", 1.0, version=2),
    Row("t6", "rename", "codex", 0.0, version=2),
    # version 3 after training
    Row("f1", "rename", "pi", 1.0, version=3),
    Row("f1", "rename", "pi", 1.0, version=3),
    Row("f2", "rename", "codex", 1.0, version=3),
    Row("f2", "rename", "codex", 0.0, version=3),
    Row("f3", "count", "pi", 1.0, version=3),
    Row("f3", "count", "pi", 1.0, version=3),
    Row("f4", "count", "codex", 0.0, version=3),
    Row("f4", "count", "codex", None, version=3, faults=("lease_expired", "lease_expired", "sandbox_failed")),
]

DISPOSED = {
    "t1": {"state": GroupState.TRAINED, "step": 1, "staleness": 0},
    "t2": {"state": GroupState.TRAINED, "step": 1, "staleness": 0},
    "t3": {"state": GroupState.SKIPPED, "reason": "no variance"},
    "t4": {"state": GroupState.SKIPPED, "reason": "no variance"},
    "t5": {"state": GroupState.TRAINED, "step": 2, "staleness": 1},
    "t6": {"state": GroupState.TRAINED, "step": 2, "staleness": 0},
}


def a_trace(row: Row, session: str) -> list[CallRecord]:
    """The calls of one attempt: a line, then the call that forked."""
    count = CALLS[row.harness]
    calls: list[CallRecord] = []
    histories: list[list[Message]] = [[{"role": "user", "content": f"Do {row.task}."}]]
    prompt = np.arange(10, 16)
    for number in range(1, count + 1):
        call = a_call(session, number, prompt, row.version, histories[-1], tool=number < count)
        calls.append(call)
        prompt = np.concatenate((call.tokens, [20 + number, 30]))
        turn = {"role": "assistant", "tool_calls": [{"function": each} for each in call.reply["tool_calls"]]}
        histories.append([*histories[-1], turn, {"role": "tool", "content": f"result {number}"}])
    number, last = count + 1, histories[count]
    match row.fork:
        case "subagent":
            title = [{"role": "user", "content": "Name this."}]
            calls.append(a_call(session, number, np.arange(50, 54), row.version, title, system="title", tools=None))
        case "retokenised":
            changed = np.concatenate((calls[0].prompt_ids, [99], prompt[7:]))
            calls.append(a_call(session, number, changed, row.version, last))
        case "retry":
            calls.append(a_call(session, number, calls[-1].prompt_ids, row.version, histories[count - 1]))
        case "history_edited":
            back = [*histories[1][:2], {"role": "user", "content": "Another way, please."}]
            calls.append(a_call(session, number, np.concatenate((calls[0].tokens, [77])), row.version, back))
        case _:
            pass
    return calls


def a_call(session, number, prompt, version, messages, *, tool=False, system="agent", tools="tools"):
    return CallRecord(
        call_id=f"{session}-{number}",
        session_id=session,
        number=number,
        prompt_ids=np.asarray(prompt, np.int32),
        completion_ids=np.arange(100 + 10 * number, 104 + 10 * number, dtype=np.int32),
        logprobs=np.full(4, LOGPROB[version], np.float32),
        versions=np.full(4, version, np.int32),
        version_dispatch=version,
        version_completion=version,
        request={"system_digests": [system], "tools_digest": tools, "messages": messages, "messages_base": 0},
        reply={"content": None, "tool_calls": [{"name": "bash", "arguments": "{}"}] if tool else []},
        dialect="chat",
        started=1790000000.0,
        ended=1790000001.0,
        delivered="yes",
        level="tokens",
        engine="http://engine",
    )


async def seed(tx) -> None:
    """Write the run."""
    tx.session.add(
        a_run("first-run", state=RunState.DONE, step=2, file={"budget": {"sampled_tokens": BUDGET}}),
    )
    tx.session.add_all(a_task(f"sha256:{task}", task_id=task) for task in ("rename", "count"))
    await tx.session.flush()
    members = [(group, list(rows)) for group, rows in groupby(ROLLOUTS, key=lambda row: row.group)]
    tx.session.add_all(group_row(group, rows, number) for number, (group, rows) in enumerate(members))
    for step, version, stale in ((1, 2, [0, 0]), (2, 3, [1, 0])):
        given = {"staleness_mean": sum(stale) / 2, "staleness_max": max(stale), "metrics": {}, "seconds": 2.0}
        tx.session.add(Step(run_id="first-run", step=step, epoch=1, version=version, groups=2, created_at=NOW, **given))
    await tx.session.flush()
    for group, rows in members:
        for place, row in enumerate(rows):
            await write_rollout(tx, row, f"{group}-{place}", place)


def group_row(group, rows, number):
    row = rows[0]
    evaluation = not group.startswith("t")
    given = {"purpose": "eval", "state": GroupState.CLOSED, "version": row.version} if evaluation else DISPOSED[group]
    return a_group(group, "first-run", task_digest=f"sha256:{row.task}", harness=row.harness, number=number, **given)


async def write_rollout(tx, row, name, place):
    attempts = len(row.faults) + (row.score is not None)
    session = f"{name}.{attempts}"
    calls = a_trace(row, session) if row.score is not None else []
    trace = FakeTrace()
    trace.calls[session] = calls
    sealed = Sealed(committed=len(calls), aborted=0, lost=0, undelivered=0)
    archive = await Archiver(trace).read(session, sealed=sealed, graded=True)
    tx.session.add(
        Rollout(
            id=name,
            run_id="first-run",
            group_id=row.group,
            number=place,
            attempt=attempts,
            state=RolloutState.ENDED if row.score is None else RolloutState.SCORED,
            outcome=Outcome.INFRA_ERROR if row.score is None else row.outcome,
            cause=row.faults[-1] if row.score is None else None,
            score=row.score,
            reward=row.score,
            calls=len(calls),
            sampled_tokens=archive.sampled_tokens,
            version_min=archive.version_min,
            version_max=archive.version_max,
            created_at=NOW,
            ended_at=NOW + timedelta(minutes=1),
        )
    )
    await tx.session.flush()
    for number, cause in enumerate(row.faults, 1):
        tx.session.add(
            Attempt(
                id=f"{name}.{number}", rollout_id=name, number=number, outcome=Outcome.INFRA_ERROR, cause=cause, created_at=NOW
            )
        )
    if row.score is not None:
        tx.session.add(Attempt(id=session, rollout_id=name, number=attempts, outcome=row.outcome, created_at=NOW))
    await tx.session.flush()
    store(tx, archive)
