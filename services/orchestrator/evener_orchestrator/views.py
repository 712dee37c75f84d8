"""Views for people who ask the ledger in SQL: the same names and columns on SQLite (>= 3.35) and on Postgres.

Pass@1 = the share of scored rollouts whose score is 1, with Wilson's 95 % interval (the same as `interval.wilson`). Rollouts
that failed through a fault of ours are not in it: an infrastructure fault is not a grade. Where JSON and arrays have no common
SQL the text is the database's own. `ledger.migrate` makes them anew with every revision: a changed view comes with one.
"""

from dataclasses import dataclass

_Z = "1.959963984540054"
_SOLVED = "CASE WHEN o.state = 'scored' THEN CAST(CASE WHEN o.score >= 1 THEN 1 ELSE 0 END AS double precision) END"
_CAUSES = "template, retokenised, history_edited, thinking_dropped, compaction, subagent, retry or unknown"


@dataclass(frozen=True, slots=True)
class View:
    """A SELECT and what it is for; ``sqlite`` only where its text differs."""

    comment: str
    text: str
    sqlite: str | None = None


def _matrix(*, family: bool) -> str:
    by = "run_id, run, purpose, version, harness, profile" + (", family" if family else "")
    return f"""
    WITH graded AS (
        SELECT r.id AS run_id, r.name AS run, g.purpose, coalesce(g.version, o.version_min) AS version,
               g.harness, g.profile, t.family, {_SOLVED} AS solved
        FROM rollouts o
        JOIN groups g ON g.id = o.group_id
        JOIN runs r ON r.id = o.run_id
        JOIN tasks t ON t.digest = g.task_digest
        WHERE o.state = 'scored'
    ), counted AS (
        SELECT {by}, count(*) AS n, sum(solved) AS solved, avg(solved) AS p FROM graded GROUP BY {by}
    ), half AS (
        SELECT counted.*, p + {_Z} * {_Z} / (2.0 * n) AS centre, 1.0 + {_Z} * {_Z} / n AS scale,
               {_Z} * sqrt(p * (1.0 - p) / n + {_Z} * {_Z} / (4.0 * n * n)) AS width
        FROM counted
    )
    SELECT {by}, n, CAST(solved AS integer) AS solved, p AS pass_at_1,
           CASE WHEN centre > width THEN (centre - width) / scale ELSE 0.0 END AS low,
           CASE WHEN centre + width < scale THEN (centre + width) / scale ELSE 1.0 END AS high
    FROM half"""  # noqa: S608 - constants only


def _trajectories(budget: str) -> str:
    return f"""
    SELECT o.id AS rollout_id, r.name AS run, o.run_id, o.group_id, t.task_id, t.family, g.harness, g.profile, g.purpose,
           coalesce(g.version, o.version_min) AS version, o.attempt, o.outcome, o.cause, o.score, {_SOLVED} AS solved,
           o.reward, o.calls,
           (SELECT sum(c.tools) FROM calls c WHERE c.attempt_id = a.id) AS tool_calls,
           o.sampled_tokens, CAST({budget} AS integer) AS budget_tokens, o.version_min, o.version_max,
           (SELECT count(*) FROM sequences s WHERE s.attempt_id = a.id) AS sequences,
           (SELECT coalesce(sum(s.trained_tokens), 0) FROM sequences s WHERE s.attempt_id = a.id) AS trained_tokens,
           g.state AS group_state, g.step, g.staleness, a.snapshot, a.logs, o.created_at, o.ended_at
    FROM rollouts o
    JOIN groups g ON g.id = o.group_id
    JOIN runs r ON r.id = o.run_id
    JOIN tasks t ON t.digest = g.task_digest
    LEFT JOIN attempts a ON a.rollout_id = o.id AND a.number = o.attempt"""  # noqa: S608 - constants only


_TOKENS_POSTGRES = """
    SELECT a.rollout_id, s.attempt_id, s.id AS sequence_id, s.number AS sequence,
           CAST(span.start + t.n - 1 AS integer) AS position, span.kind, t.token_id,
           CASE WHEN span.kind = 'sampled' THEN t.logprob END AS logprob, run.version, span.call_id
    FROM sequences s
    JOIN attempts a ON a.id = s.attempt_id
    CROSS JOIN LATERAL jsonb_to_recordset(s.spans) AS span(start integer, "end" integer, call_id text, kind text)
    CROSS JOIN LATERAL unnest(s.token_ids[span.start + 1:span."end"], s.logprobs[span.start + 1:span."end"])
        WITH ORDINALITY AS t(token_id, logprob, n)
    LEFT JOIN LATERAL (
        SELECT CAST(each ->> 2 AS integer) AS version FROM jsonb_array_elements(s.version_runs) AS each
        WHERE span.start + t.n - 1 >= CAST(each ->> 0 AS integer) AND span.start + t.n - 1 < CAST(each ->> 1 AS integer)
    ) run ON true"""


def _word(column: str) -> str:
    """SQL for the little-endian uint32 that token ``n`` has in a blob: SQLite reads bytes only as hexadecimal digits."""
    digits = (1, 0, 3, 2, 5, 4, 7, 6)  # of the least significant first
    digit = "(instr('123456789ABCDEF', substr(hex(substr({}, 4 * n + 1, 4)), {}, 1)) << {})"
    return " + ".join(digit.format(column, place + 1, 4 * power) for power, place in enumerate(digits))


_TOKENS_SQLITE = f"""
    WITH RECURSIVE place(n) AS (
        SELECT 0 UNION ALL SELECT n + 1 FROM place WHERE n + 1 < (SELECT max(tokens) FROM sequences)
    ), words AS (
        SELECT a.rollout_id, s.attempt_id, s.id AS sequence_id, s.number AS sequence, n,
               json_extract(span.value, '$.kind') AS kind, json_extract(span.value, '$.call_id') AS call_id,
               s.version_runs, {_word("s.token_ids")} AS id, {_word("s.logprobs")} AS bits
        FROM sequences s
        JOIN attempts a ON a.id = s.attempt_id
        JOIN json_each(s.spans) AS span
        JOIN place ON n >= json_extract(span.value, '$.start') AND n < json_extract(span.value, '$.end')
    ), numbers AS (
        SELECT words.*, (bits >> 23) & 255 AS exponent, (bits & 8388607) + 8388608.0 AS mantissa FROM words
    )
    SELECT rollout_id, attempt_id, sequence_id, sequence, n AS position, kind,
           CASE WHEN id >= 2147483648 THEN id - 4294967296 ELSE id END AS token_id,
           CASE WHEN kind <> 'sampled' THEN NULL
                WHEN exponent < 88 THEN 0.0 -- below 4e-12
                WHEN exponent < 150 THEN (1 - 2 * (bits >> 31)) * mantissa / (1 << (150 - exponent))
                ELSE (1 - 2 * (bits >> 31)) * mantissa * (1 << (exponent - 150)) END AS logprob,
           (SELECT json_extract(run.value, '$[2]') FROM json_each(version_runs) AS run
            WHERE n >= json_extract(run.value, '$[0]') AND n < json_extract(run.value, '$[1]')) AS version,
           call_id
    FROM numbers"""  # noqa: S608 - constants only

VIEWS = {
    "harness_matrix": View("Pass@1 with its 95 % interval by run, purpose, version and harness", _matrix(family=False)),
    "family_matrix": View("The same by family of tasks", _matrix(family=True)),
    "trajectories": View(
        "A rollout a row: task, harness, outcome, score, reward, what it used, and what became of its group",
        _trajectories("r.file #>> '{budget,sampled_tokens}'"),
        _trajectories("json_extract(r.file, '$.budget.sampled_tokens')"),
    ),
    "group_signal": View(
        "A training group a row: how its rewards spread; a range of 0 teaches nothing",
        f"""
    SELECT g.id AS group_id, g.run_id, t.task_id, t.family, g.harness, g.state, g.reason, g.step, count(*) AS scored,
           avg(o.reward) AS reward_mean, max(o.reward) - min(o.reward) AS reward_range,
           avg({_SOLVED}) AS solved
    FROM groups g
    JOIN tasks t ON t.digest = g.task_digest
    JOIN rollouts o ON o.group_id = g.id AND o.state = 'scored'
    WHERE g.purpose = 'train'
    GROUP BY g.id, g.run_id, t.task_id, t.family, g.harness, g.state, g.reason, g.step""",  # noqa: S608
    ),
    "reward_curve": View(
        "An optimizer step a row: rewards and scores of the rollouts it trained",
        f"""
    SELECT s.run_id, s.step, s.version, count(*) AS rollouts, avg(o.reward) AS reward, avg(o.score) AS score,
           avg({_SOLVED}) AS solved, s.seconds
    FROM steps s
    JOIN groups g ON g.run_id = s.run_id AND g.step = s.step
    JOIN rollouts o ON o.group_id = g.id AND o.state = 'scored'
    GROUP BY s.run_id, s.step, s.version, s.seconds""",  # noqa: S608
    ),
    "staleness": View(
        "An optimizer step a row: how many versions old its groups were",
        """
    SELECT s.run_id, s.step, s.version, s.groups, s.staleness_mean, s.staleness_max FROM steps s""",
    ),
    "failures": View(
        "Rollouts that did not finish, counted by run, harness, task, outcome and cause",
        """
    SELECT o.run_id, g.harness, t.task_id, o.outcome, o.cause, count(*) AS rollouts, max(o.id) AS latest_rollout
    FROM rollouts o
    JOIN groups g ON g.id = o.group_id
    JOIN tasks t ON t.digest = g.task_digest
    WHERE o.outcome IS NOT NULL AND o.outcome <> 'finished'
    GROUP BY o.run_id, g.harness, t.task_id, o.outcome, o.cause""",
    ),
    "tool_calls": View(
        "A tool call a row: name and arguments as the policy wrote them",
        """
    SELECT a.rollout_id, c.attempt_id, c.id AS call_id, c.number, tool ->> 'name' AS tool, tool ->> 'arguments' AS arguments
    FROM calls c JOIN attempts a ON a.id = c.attempt_id
    CROSS JOIN LATERAL jsonb_array_elements(c.reply -> 'tool_calls') tool
    WHERE c.tools > 0""",
        """
    SELECT a.rollout_id, c.attempt_id, c.id AS call_id, c.number, json_extract(tool.value, '$.name') AS tool,
           json_extract(tool.value, '$.arguments') AS arguments
    FROM calls c JOIN attempts a ON a.id = c.attempt_id, json_each(c.reply, '$.tool_calls') tool
    WHERE c.tools > 0""",
    ),
    "fork_causes": View(
        f"A call a row that left its trace's line, and why: {_CAUSES}",
        """
    SELECT o.run_id, g.harness, g.profile, t.task_id, a.rollout_id, c.attempt_id, c.id AS call_id, c.number, c.parent_id,
           c.call_class, c.fork AS cause, c.fork_from, c.fork_position AS position, c.fork_was AS was, c.fork_now AS now
    FROM calls c
    JOIN attempts a ON a.id = c.attempt_id
    JOIN rollouts o ON o.id = a.rollout_id
    JOIN groups g ON g.id = o.group_id
    JOIN tasks t ON t.digest = g.task_digest
    WHERE c.fork IS NOT NULL""",
    ),
    "tokens": View(
        "A token of a training row a row: kind (prompt, sampled: trained here, context: sampled, but not trained here),"
        " log-probability and policy version where sampled",
        _TOKENS_POSTGRES,
        _TOKENS_SQLITE,
    ),
}
"""The views by name."""


def create_view(name: str, dialect: str) -> str:
    """The statement that creates a view on ``sqlite`` or ``postgresql``."""
    view = VIEWS[name]
    text = view.sqlite if dialect == "sqlite" and view.sqlite else view.text
    return f"CREATE VIEW {name} AS {text.strip()}"
