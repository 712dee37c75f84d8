"""What is graded is the snapshot, but for what would turn the tests against themselves; each such change is a finding.

Protected files are as they were at the start. In process, startup hooks that the agent made are gone. With a separate
environment only the artifacts are the agent's. Works on tar files; called by the verifier.
"""

import copy
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from evener.errors import TaskError
from evener.sandbox import WORKSPACE
from evener.tasks import TaskToml
from evener_verifier import hooks
from evener_verifier.contents import Contents
from evener_verifier.findings import Finding

PROTECTED = (
    *("test_*.py", "*_test.py", "*_test.go", "*.test.js", "*.test.ts", "*.spec.js", "*.spec.ts", "conftest.py"),
    *("test/*", "tests/*", "*/test/*", "*/tests/*"),
)
"""Tests that were in the workspace at the start. ``*`` stands for slashes too; without a slash the file's name is meant."""


@dataclass(slots=True)
class Plan:
    """What is to become of the snapshot's entries."""

    restored: set[str] = field(default_factory=set[str])
    dropped: set[str] = field(default_factory=set[str])
    findings: list[Finding] = field(default_factory=list[Finding])


@dataclass(frozen=True, slots=True)
class Graded:
    """The workspace as the grader finds it, and what was done to it."""

    tar: bytes
    findings: list[Finding]


def prepare(pristine: Contents, snapshot: Contents, toml: TaskToml) -> Graded:
    """The workspace to grade. Raises TaskError ``task_setup`` for artifacts that are not of the workspace."""
    plan = Plan()
    _protect(pristine, snapshot, PROTECTED if toml.verifier.protect is None else toml.verifier.protect, plan)
    if toml.verifier.tier == "in_process":
        _keep_hooks_away(pristine, snapshot, plan)
    if toml.verifier.separate:
        _take_artifacts_only(pristine, snapshot, _artifacts(toml), plan)
    if not plan.restored and not plan.dropped:
        return Graded(snapshot.tar, plan.findings)
    return Graded(_follow(plan, pristine, snapshot), plan.findings)


def without_execution(tar: bytes) -> bytes:
    """The same files, of which none can be executed by its name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as source, tarfile.open(fileobj=buffer, mode="w") as target:
        for member in source:
            info = copy.copy(member)
            info.mode = member.mode if member.isdir() else member.mode & ~0o111
            target.addfile(info, source.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


def _protect(pristine: Contents, snapshot: Contents, patterns: Iterable[str], plan: Plan) -> None:
    for name, entry in pristine.files():
        found = snapshot.entries.get(name)
        if found != entry and any(_matches(name, pattern) for pattern in patterns):
            plan.restored.add(name)
            how = "removed" if found is None else "changed"
            plan.findings.append(Finding("protected_restored", f"{name} was {how}, and is graded as it was at the start"))


def _keep_hooks_away(pristine: Contents, snapshot: Contents, plan: Plan) -> None:
    for name, entry in snapshot.files():
        original = pristine.entries.get(name)
        if entry == original or name in plan.restored:
            continue
        why = hooks.reason(name, lambda name=name: snapshot.read(name))
        if why is not None:
            plan.dropped.add(name)
            if original is not None and original.is_file:
                plan.restored.add(name)
            plan.findings.append(Finding("hook_kept_away", f"{name}: {why}"))


def _take_artifacts_only(pristine: Contents, snapshot: Contents, artifacts: list[str], plan: Plan) -> None:
    for artifact in artifacts:
        if not any(_below(name, artifact) for name in snapshot.entries):
            plan.findings.append(Finding("artifact_missing", f"{artifact} is not in the workspace"))
    outside = [name for name in snapshot.entries if not any(_below(name, artifact) for artifact in artifacts)]
    plan.dropped.update(name for name in outside if not snapshot.entries[name].is_folder)
    plan.restored.update(name for name, _ in pristine.files() if not any(_below(name, artifact) for artifact in artifacts))


def _artifacts(toml: TaskToml) -> list[str]:
    """Their paths relative to the workspace."""
    names: list[str] = []
    for source in toml.artifact_paths:
        path = PurePosixPath(WORKSPACE, source)
        if not path.is_relative_to(WORKSPACE) or ".." in path.parts:
            raise TaskError("task_setup", f"artifacts: {source} is not below {WORKSPACE}, which is all that a snapshot holds")
        names.append(str(path.relative_to(WORKSPACE)))
    return names


def _follow(plan: Plan, pristine: Contents, snapshot: Contents) -> bytes:
    """Nothing of the snapshot lies above or below a restored file but the folders that it needs."""
    parents = {str(parent) for name in plan.restored for parent in PurePosixPath(name).parents}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for name, entry in snapshot.entries.items():
            replaced = name in plan.restored or any(str(parent) in plan.restored for parent in PurePosixPath(name).parents)
            blocks = name in parents and not entry.is_folder
            if not (replaced or blocks or name in plan.dropped):
                target.addfile(entry.member, io.BytesIO(snapshot.read(name)) if entry.is_file else None)
        for name in sorted(plan.restored):
            entry = pristine.entries[name]
            target.addfile(entry.member, io.BytesIO(pristine.read(name)) if entry.is_file else None)
    return buffer.getvalue()


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern)


def _below(name: str, artifact: str) -> bool:
    return artifact == "." or name == artifact or name.startswith(artifact + "/")
