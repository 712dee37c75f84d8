"""What a person needs to judge a score: what the tests said, and what the agent changed. It decides nothing.

Called by the verifier; travels in `RolloutScored.evidence`, so it is small.
"""

import difflib
from typing import Any

from evener.sandbox import ExecResult
from evener_verifier.contents import Contents, Entry

OUTPUT_LIMIT = 4 << 10
"""Bytes shown of the end of each of stdout and stderr."""
NAMES_LIMIT = 50
"""Names shown of the files that were added, changed or removed."""
NAME_LIMIT = 200
DIFF_LIMIT = 4 << 10
"""Characters shown of the differences; a file of more bytes than this is named and not compared."""


def of_run(result: ExecResult) -> dict[str, Any]:
    """How the tests ended, and the end of what they said."""
    return {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "seconds": round(result.seconds, 3),
        "stdout": end(result.stdout),
        "stderr": end(result.stderr),
    }


def changes(before: Contents, after: Contents) -> dict[str, Any]:
    """Names of the files that differ between two workspaces, and how many there are of each kind."""
    kinds = _changed(before, after)
    return {
        kind: {"count": len(names), "names": [name[:NAME_LIMIT] for name in names[:NAMES_LIMIT]]}
        for kind, names in kinds.items()
    }


def names(tar: bytes) -> dict[str, Any]:
    """The files of a tar file, and how many there are."""
    found = [name for name, _ in Contents(tar).files()]
    return {"count": len(found), "names": [name[:NAME_LIMIT] for name in found[:NAMES_LIMIT]]}


def diff(before: Contents, after: Contents) -> str:
    """The differences of small text files, as by ``diff -u``, cut off at `DIFF_LIMIT` characters."""
    shown: list[str] = []
    room = DIFF_LIMIT
    for name in sorted(name for names in _changed(before, after).values() for name in names):
        old, new = _text(before, name), _text(after, name)
        if old is None or new is None:
            continue
        text = "\n".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm=""))
        if len(text) > room:
            return "\n".join([*shown, text[:room], "(cut off)"])
        shown.append(text)
        room -= len(text)
    return "\n".join(shown)


def end(output: bytes) -> str:
    """The end of an output."""
    return output[-OUTPUT_LIMIT:].decode(errors="replace")


def _changed(before: Contents, after: Contents) -> dict[str, list[str]]:
    old: dict[str, Entry] = dict(before.files())
    new: dict[str, Entry] = dict(after.files())
    return {
        "added": sorted(new.keys() - old.keys()),
        "changed": sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
        "removed": sorted(old.keys() - new.keys()),
    }


def _text(contents: Contents, name: str) -> list[str] | None:
    """The lines of a small text file; none where there is no such file; None for what cannot be compared."""
    entry = contents.entries.get(name)
    if entry is None:
        return []
    if not entry.is_file or entry.member.size > DIFF_LIMIT:
        return None
    try:
        return contents.read(name).decode().splitlines()
    except UnicodeDecodeError:
        return None
