"""What was seen of a workspace or its code that a person should know; what is `tampering` makes the score 0.

Made by `workspace`, `canary` and the verifier; kept in the evidence of the score.
"""

from dataclasses import dataclass
from typing import Any

LIMIT = 50
"""Findings kept of one scoring."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was seen; ``kind`` is a word to count by."""

    kind: str
    detail: str
    tampering: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the evidence."""
        return {"kind": self.kind, "detail": self.detail[:300], "tampering": self.tampering}
