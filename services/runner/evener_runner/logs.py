"""What a person reads when a rollout surprises him: the agent's output and what we saw, without a secret.

Called by the attempt.
"""

from collections.abc import Iterable, Sequence

from evener.sandbox import ExecResult
from evener_runner.outcome import Verdict


def compose(
    verdict: Verdict, results: Sequence[ExecResult], failures: list[str], left_out: list[str], secrets: Iterable[str]
) -> bytes:
    """A rollout's log as text in UTF-8, with a result for each step; every occurrence of a secret is masked.

    ``failures``: set-up scripts of steps that failed in what the agent had left.
    """
    parts = [f"outcome: {verdict.outcome} {verdict.cause or ''} {verdict.detail}".rstrip().encode() + b"\n"]
    for result in results:
        parts.append(f"exit code: {result.exit_code}, after {result.seconds:.2f} s\n".encode())
        parts += [b"--- stdout\n", result.stdout, b"\n--- stderr\n", result.stderr, b"\n"]
    if failures:
        parts += [b"--- set-up scripts that failed\n", "\n".join(failures).encode(errors="replace"), b"\n"]
    if left_out:
        parts += [b"--- left out of the snapshot\n", "\n".join(left_out).encode(errors="replace"), b"\n"]
    text = b"".join(parts)
    for secret in secrets:
        text = text.replace(secret.encode(), b"***")
    return text.decode(errors="replace").encode()
