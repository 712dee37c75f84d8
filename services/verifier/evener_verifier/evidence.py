"""What a person needs to judge a score: what the tests said, and what the agent changed. It decides nothing.

Called by the verifier; travels in `RolloutScored.evidence`, so it is small.
"""

import hashlib
import io
import tarfile
from typing import Any

from evener.sandbox import ExecResult

OUTPUT_LIMIT = 4 << 10
"""Bytes shown of the end of each of stdout and stderr."""
NAMES_LIMIT = 50
"""Names shown of the files that were added, changed or removed."""


def compose(result: ExecResult, pristine: bytes, snapshot: bytes) -> dict[str, Any]:
    """The evidence of one verification; ``pristine`` is the workspace that the agent found, as a tar file."""
    return {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "seconds": round(result.seconds, 3),
        "stdout": _end(result.stdout),
        "stderr": _end(result.stderr),
        "changes": changes(pristine, snapshot),
    }


def changes(before: bytes, after: bytes) -> dict[str, Any]:
    """Names of the files that differ between two archives, and how many there are of each kind."""
    old, new = _digests(before), _digests(after)
    kinds = {
        "added": sorted(new.keys() - old.keys()),
        "changed": sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
        "removed": sorted(old.keys() - new.keys()),
    }
    return {kind: {"count": len(names), "names": names[:NAMES_LIMIT]} for kind, names in kinds.items()}


def _digests(tar: bytes) -> dict[str, str]:
    """Content digest (or link target) by name, of what is not a folder."""
    digests: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                digests[member.name] = hashlib.sha256(content.read()).hexdigest()
            elif member.issym():
                digests[member.name] = f"-> {member.linkname}"
    return digests


def _end(output: bytes) -> str:
    return output[-OUTPUT_LIMIT:].decode(errors="replace")
