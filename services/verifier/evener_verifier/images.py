"""A grader's own image is a root filesystem that was unpacked ahead of time: nothing is fetched or built while grading.

Below the folder that ``EVENER_GRADER_IMAGES`` names each image lies at its name. As in the Harbor format it has tests of its
own, at ``/tests``. Called by the verifier, once a grading.
"""

import os
from pathlib import Path

from evener.errors import InfraError, TaskError
from evener.sandbox import Kind
from evener.tasks import TaskToml

_FOLDERS = ("usr/local/bin", "usr/bin", "bin")


def image_of(toml: TaskToml, images: Path | None, kind: Kind) -> Path | None:
    """The root filesystem that a task's grader is to have; None where it has the host's.

    Raises InfraError where this host has no such image, TaskError ``task_setup`` for one that no grader can run in.
    """
    name = toml.verifier.image
    if name is None:
        return None
    if kind == "process":
        raise TaskError("task_setup", f"the grader's image {name} needs a sandbox of kind bubblewrap, and there is none here")
    if images is None:
        raise InfraError("sandbox_failed", f"EVENER_GRADER_IMAGES names no folder with the grader's image {name}")
    root = images / name
    if not root.is_dir():
        raise InfraError("sandbox_failed", f"{root}: the grader's image is not there (docs/verifier.md says how to unpack it)")
    for program, use in _needs(toml).items():
        if program_of(root, program) is None:
            raise TaskError("task_setup", f"the grader's image {name} has no {program}, {use}")
    if toml.verify is None and not (root / "tests/test.sh").is_file():
        raise TaskError("task_setup", f"the grader's image {name} has no /tests/test.sh: an image brings its tests with it")
    return root


def program_of(root: Path, name: str) -> str | None:
    """The path inside of a program of an image, which may be a link to what only the image has."""
    found = (folder for folder in _FOLDERS if (root / folder / name).is_file() or (root / folder / name).is_symlink())
    return next((f"/{folder}/{name}" for folder in found), None)


def _needs(toml: TaskToml) -> dict[str, str]:
    needs = {"sh": "which runs the tests"}
    if toml.verifier.tier == "out_of_process":
        needs["python3"] = "which `candidate` is written in"
    if os.geteuid() == 0:
        needs["setpriv"] = "by which a verifier that root runs drops its rights (util-linux)"
    return needs
