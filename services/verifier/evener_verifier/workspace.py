"""What is graded is the snapshot, but for what would turn the tests against themselves; each such change is a finding.

Protected files are as they were at the start. In process, startup hooks that the agent made are gone. With a separate
environment only the artifacts are the agent's; in an image all else is the image's. Works on tar files; called by the verifier.
"""

import copy
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from evener.archive import tar_of_files
from evener.artifacts import collects
from evener.sandbox import WORKSPACE, snapshot
from evener.tasks import TaskToml
from evener_verifier import hooks
from evener_verifier.contents import Contents
from evener_verifier.findings import Finding

PROTECTED = (
    *("test_*.py", "*_test.py", "*_test.go", "*.test.js", "*.test.ts", "*.spec.js", "*.spec.ts", "conftest.py"),
    *("test/*", "tests/*", "*/test/*", "*/tests/*"),
)
"""Tests that were in the workspace at the start. ``*`` stands for slashes too; without a slash the file's name is meant."""
NOTHING = tar_of_files({})


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


def prepare(pristine: Contents, left: Contents, toml: TaskToml) -> Graded:
    """The workspace to grade."""
    plan = Plan()
    _protect(pristine, left, PROTECTED if toml.verifier.protect is None else toml.verifier.protect, plan)
    if toml.verifier.tier == "in_process":
        _keep_hooks_away(pristine, left, plan)
    if toml.verifier.separate:
        _take_artifacts_only(pristine, left, WORKSPACE, toml, plan)
    return _follow(plan, pristine, left)


def prepare_outside(place: str, tar: bytes, toml: TaskToml) -> Graded:
    """The same for a folder outside of the workspace, which was empty at the start."""
    plan, pristine, left = Plan(), Contents(NOTHING), Contents(tar)
    if toml.verifier.tier == "in_process":
        _keep_hooks_away(pristine, left, plan)
    if toml.verifier.separate:
        _take_artifacts_only(pristine, left, place, toml, plan)
    return _follow(plan, pristine, left)


def baked(image: Path, place: str, toml: TaskToml) -> bytes:
    """What an image has at ``place``, but for what artifacts take the place of, as a tar file. Blocks. Raises OSError."""
    folder = image / place.lstrip("/")
    if not folder.is_dir():
        return NOTHING
    plan, own = Plan(), Contents(snapshot.take(folder, place).tar)
    plan.dropped = {name for name in own.entries if _is_artifact(place, name, toml)}
    return _follow(plan, Contents(NOTHING), own).tar


def without_execution(tar: bytes) -> bytes:
    """The same files, of which none can be executed by its name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as source, tarfile.open(fileobj=buffer, mode="w") as target:
        for member in source:
            info = copy.copy(member)
            info.mode = member.mode if member.isdir() else member.mode & ~0o111
            target.addfile(info, source.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


def _protect(pristine: Contents, left: Contents, patterns: Iterable[str], plan: Plan) -> None:
    for name, entry in pristine.files():
        found = left.entries.get(name)
        if found != entry and any(_matches(name, pattern) for pattern in patterns):
            plan.restored.add(name)
            how = "removed" if found is None else "changed"
            plan.findings.append(Finding("protected_restored", f"{name} was {how}, and is graded as it was at the start"))


def _keep_hooks_away(pristine: Contents, left: Contents, plan: Plan) -> None:
    for name, entry in left.files():
        original = pristine.entries.get(name)
        if entry == original or name in plan.restored:
            continue
        why = hooks.reason(name, lambda name=name: left.read(name))
        if why is not None:
            plan.dropped.add(name)
            if original is not None and original.is_file:
                plan.restored.add(name)
            plan.findings.append(Finding("hook_kept_away", f"{name}: {why}"))


def _take_artifacts_only(pristine: Contents, left: Contents, place: str, toml: TaskToml, plan: Plan) -> None:
    paths = [PurePosixPath(place, name) for name in left.entries]
    for artifact in toml.artifacts:
        here = PurePosixPath(WORKSPACE, artifact.source).is_relative_to(place)
        if here and not any(collects(artifact.source, (), path) for path in paths):
            plan.findings.append(Finding("artifact_missing", f"{artifact.source} is not there"))
    plan.dropped |= {name for name, _ in left.files() if not _is_artifact(place, name, toml)}
    given = {name for name, _ in pristine.files() if not _is_artifact(place, name, toml)}
    plan.restored = plan.restored - given if toml.verifier.image else plan.restored | given


def _is_artifact(place: str, name: str, toml: TaskToml) -> bool:
    return any(collects(each.source, each.exclude, PurePosixPath(place, name)) for each in toml.collected)


def _follow(plan: Plan, pristine: Contents, left: Contents) -> Graded:
    """Nothing of what was left lies above or below a restored file but the folders that it needs."""
    if not plan.restored and not plan.dropped:
        return Graded(left.tar, plan.findings)
    parents = {str(parent) for name in plan.restored for parent in PurePosixPath(name).parents}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for name, entry in left.entries.items():
            replaced = name in plan.restored or any(str(parent) in plan.restored for parent in PurePosixPath(name).parents)
            blocks = name in parents and not entry.is_folder
            if not (replaced or blocks or name in plan.dropped):
                target.addfile(entry.member, io.BytesIO(left.read(name)) if entry.is_file else None)
        for name in sorted(plan.restored):
            entry = pristine.entries[name]
            target.addfile(entry.member, io.BytesIO(pristine.read(name)) if entry.is_file else None)
    return Graded(buffer.getvalue(), plan.findings)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern)
