"""What a verifier saw, as `evener rollouts show` tells it: the score, how far it can be trusted, and the evidence.

The documents are those of ``/v1/rollouts/{id}``: its scores, then what was graded again. An evidence of an older version lacks
some of its parts.
"""

from typing import Any

from evener.cli.output import cell, out

_SHOWN = (("stdout", "the tests said"), ("stderr", "the tests said on standard error"), ("diff", "what the agent changed"))


def print_scores(scores: list[dict[str, Any]]) -> None:
    """Print each score with its evidence."""
    for score in scores:
        evidence = score["evidence"]
        again = f", graded again: {score['ended_at'] or 'waits for a verifier'}" if "ended_at" in score else ""
        out.rule(f"score of {score['attempt_id']}{again}", align="left")
        _line("scores", score["scores"])
        if score["cause"]:
            _line("fault", f"{score['cause']}: {score['detail']}")
        if "tier" in evidence:
            isolated = "" if evidence["isolated"] else "; NOTHING kept the candidate from tests and reward"
            _line("tier", f"{evidence['tier']} ({evidence['sandbox']}{isolated})")
        _line(
            "seconds", f"{cell(evidence['seconds'])} of {cell(score['seconds'])}" if "seconds" in evidence else score["seconds"]
        )
        for step in evidence.get("steps", []):
            out.rule(f"step {step['name']}", align="left")
            _line("scores", step.get("scores", "none: an earlier step fell short, or this one could not be graded"))
            _line("tier", step["tier"])
            _print_evidence(step)
        if "steps" not in evidence:
            _print_evidence(evidence)


def _print_evidence(evidence: dict[str, Any]) -> None:
    """What was seen of one grading."""
    _line("exit code", evidence.get("exit_code"))
    _line("tests took", evidence.get("seconds"))
    if evidence.get("tampered"):
        _line("TAMPERED", f"the score is 0 whatever the tests said; claimed: {evidence.get('claimed')}")
    for finding in evidence.get("findings", []):
        _line("tampering" if finding["tampering"] else "finding", f"{finding['kind']}: {finding['detail']}")
    for runner in evidence.get("tests", []):
        failures = ", ".join(runner["failures"])
        _line(runner["runner"], f"{runner['passed']} passed, {runner['failed']} failed {failures}".rstrip())
    for call in evidence.get("candidate", {}).get("first", []):
        ended = "out of time" if call["timed_out"] else f"exit code {call['exit_code']}"
        _line("candidate", f"{call['command']}: {ended}, {cell(call['seconds'])} s")
    for kind, names in {**evidence.get("changes", {}), **evidence.get("artifacts", {})}.items():
        if names["count"]:
            _line(kind, f"{names['count']}: {', '.join(names['names'])}")
    texts = [(title, evidence.get(name)) for name, title in _SHOWN]
    texts += [(f"report {name}", text) for name, text in evidence.get("reports", {}).items()]
    for title, text in texts:
        if text:
            out.rule(title, align="left")
            out.print(text, markup=False, soft_wrap=True)


def _line(name: str, value: Any) -> None:
    out.print(f"{name:<15} {cell(value)}", markup=False, soft_wrap=True)
