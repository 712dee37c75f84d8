"""Views for people who ask the ledger in SQL; each text is valid on SQLite (>= 3.35) and on Postgres.

Pass@1 = the share of scored rollouts whose score is 1, with Wilson's 95 % interval (the same as `interval.wilson`). Rollouts
that failed through a fault of ours are not in it: an infrastructure fault is not a grade. Created by the first migration.
"""

_Z = "1.959963984540054"
_SOLVED = "CAST(CASE WHEN o.score >= 1 THEN 1 ELSE 0 END AS double precision)"


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


VIEWS = {
    "harness_matrix": _matrix(family=False),
    "family_matrix": _matrix(family=True),
    "trajectories": """
    SELECT o.id AS rollout_id, r.name AS run, o.run_id, o.group_id, t.task_id, t.family, g.harness, g.profile, g.purpose,
           o.attempt, o.outcome, o.cause, o.score, o.reward, o.calls, o.sampled_tokens, o.version_min, o.version_max,
           (SELECT count(*) FROM sequences s WHERE s.attempt_id = a.id) AS sequences,
           (SELECT coalesce(sum(s.trained_tokens), 0) FROM sequences s WHERE s.attempt_id = a.id) AS trained_tokens,
           g.state AS group_state, g.step, g.staleness, a.snapshot, a.logs, o.created_at, o.ended_at
    FROM rollouts o
    JOIN groups g ON g.id = o.group_id
    JOIN runs r ON r.id = o.run_id
    JOIN tasks t ON t.digest = g.task_digest
    LEFT JOIN attempts a ON a.rollout_id = o.id AND a.number = o.attempt""",
    "group_signal": f"""
    SELECT g.id AS group_id, g.run_id, t.task_id, t.family, g.harness, g.state, g.reason, g.step, count(*) AS scored,
           avg(o.reward) AS reward_mean, max(o.reward) - min(o.reward) AS reward_range,
           avg({_SOLVED}) AS solved
    FROM groups g
    JOIN tasks t ON t.digest = g.task_digest
    JOIN rollouts o ON o.group_id = g.id AND o.state = 'scored'
    WHERE g.purpose = 'train'
    GROUP BY g.id, g.run_id, t.task_id, t.family, g.harness, g.state, g.reason, g.step""",  # noqa: S608
    "reward_curve": f"""
    SELECT s.run_id, s.step, s.version, count(*) AS rollouts, avg(o.reward) AS reward, avg(o.score) AS score,
           avg({_SOLVED}) AS solved, s.seconds
    FROM steps s
    JOIN groups g ON g.run_id = s.run_id AND g.step = s.step
    JOIN rollouts o ON o.group_id = g.id AND o.state = 'scored'
    GROUP BY s.run_id, s.step, s.version, s.seconds""",  # noqa: S608
    "staleness": """
    SELECT s.run_id, s.step, s.version, s.groups, s.staleness_mean, s.staleness_max FROM steps s""",
    "failures": """
    SELECT o.run_id, g.harness, t.task_id, o.outcome, o.cause, count(*) AS rollouts, max(o.id) AS latest_rollout
    FROM rollouts o
    JOIN groups g ON g.id = o.group_id
    JOIN tasks t ON t.digest = g.task_digest
    WHERE o.outcome IS NOT NULL AND o.outcome <> 'finished'
    GROUP BY o.run_id, g.harness, t.task_id, o.outcome, o.cause""",
}
"""Name and SELECT of each view."""

TOOL_CALLS = {
    "sqlite": """
    SELECT a.rollout_id, c.attempt_id, c.id AS call_id, c.number, json_extract(tool.value, '$.name') AS tool,
           json_extract(tool.value, '$.arguments') AS arguments
    FROM calls c JOIN attempts a ON a.id = c.attempt_id, json_each(c.reply, '$.tool_calls') tool""",
    "postgresql": """
    SELECT a.rollout_id, c.attempt_id, c.id AS call_id, c.number, tool ->> 'name' AS tool, tool ->> 'arguments' AS arguments
    FROM calls c JOIN attempts a ON a.id = c.attempt_id
    CROSS JOIN LATERAL jsonb_array_elements(
        CASE WHEN jsonb_typeof(c.reply -> 'tool_calls') = 'array' THEN c.reply -> 'tool_calls' ELSE '[]'::jsonb END) tool""",
}
"""The one view whose text differs: JSON arrays have no common SQL."""


def create_views(dialect: str) -> list[str]:
    """The statements that create every view on ``sqlite`` or ``postgresql``."""
    texts = VIEWS | {"tool_calls": TOOL_CALLS[dialect]}
    return [f"CREATE VIEW {name} AS {text.strip()}" for name, text in texts.items()]
