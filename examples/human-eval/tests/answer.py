"""In the candidate's sandbox: answer calls of a function of solution.py, and send back plain values.

A line of standard input is the arguments of a call, a line of standard output its answer; what the candidate prints goes to
standard error. An answer has no code of its own, and no ``__eq__``. The grader (`grade`) sends this program and reads with it.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


class Unknown(Exception):
    """A value that is not plain, or a document that is no value."""


def encode(value: Any) -> Any:
    """A value as a JSON document. Raises Unknown."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each) for each in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    raise Unknown(type(value).__name__)


def decode(document: Any) -> Any:
    """The value of a document. Raises Unknown, TypeError, ValueError."""
    if isinstance(document, list):
        return [decode(each) for each in document]
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    if kind == "tuple":
        return tuple(decode(each) for each in content)
    if kind == "set":
        return {decode(each) for each in content}
    if kind == "dict":
        return {decode(key): decode(each) for key, each in content}
    raise Unknown(kind)


def answer_calls(function: str) -> None:
    """Answer them all; whatever the function raises ends it."""
    calls = [json.loads(line) for line in sys.stdin]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        called = getattr(solution(), function)
        for arguments, named in calls:
            answers.write(json.dumps(encode(called(*decode(arguments), **decode(named)))) + "\n")


def solution() -> Any:
    """The module that the workspace holds."""
    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.spec_from_file_location("solution", "solution.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["solution"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    answer_calls(sys.argv[1])
