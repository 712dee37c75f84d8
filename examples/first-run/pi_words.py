"""How a dialogue between pi and the policy reads, and what pi's tools answer on a small workspace.

Invariant: `Dialogue` texts are what chat_template.jinja makes of pi's messages, and `run_tool` answers as the recorded
pi does (pi_prompt.json) for the forms of call the policy learns; any other call gets an error text and changes nothing.
Called by make_policy.py (transcripts for the warm start) and simulate.py (rollouts without pi).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from chores import Chore

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "pi_prompt.json").read_text())
END = "<|im_end|>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Call(NamedTuple):
    """A tool call."""

    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        """The text the policy samples for this call: compact arguments, as pi sends them back."""
        arguments = json.dumps(self.arguments, ensure_ascii=False, separators=(",", ":"))
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {arguments}}}\n</tool_call>'


def user_turn(text: str) -> str:
    """An instruction, up to where the policy answers."""
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


def tool_turn(result: str) -> str:
    """A tool result, from the end of the policy's call up to where it answers again."""
    return f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{END}\n<|im_start|>assistant\n"


def parse_call(text: str) -> Call | None:
    """The tool call in a sampled text; None where there is none, or none that parses."""
    match = _CALL.search(text)
    if match is None:
        return None
    try:
        call = json.loads(match[1])
        name, arguments = call["name"], call["arguments"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _failed(text: str, code: int = 1) -> str:
    return f"{text}\n\n\nCommand exited with code {code}"


def _move(files: dict[str, str], source: str, target: str) -> str:
    if source not in files:
        return _failed(f"mv: cannot stat '{source}': No such file or directory")
    target = target.rstrip("/")
    is_folder = any(path.startswith(f"{target}/") for path in files)
    files[f"{target}/{source.rsplit('/', 1)[-1]}" if is_folder else target] = files.pop(source)
    return "(no output)"


def _bash(files: dict[str, str], command: str) -> str:
    words = command.split()
    if words[:1] == ["mv"] and len(words) == 3:
        return _move(files, words[1], words[2])
    if words == ["ls"]:
        return "".join(f"{name}\n" for name in sorted({path.split("/", 1)[0] for path in files}))
    if words[:1] == ["ls"] and len(words) == 2:
        inside = [path.split("/", 1)[1] for path in files if path.startswith(f"{words[1]}/")]
        return "".join(f"{name}\n" for name in sorted(inside) if not name.startswith(".")) or "(no output)"
    return _failed(f"bash: line 1: {words[0] if words else ''}: command not found", 127)


def _edit(files: dict[str, str], path: str, edits: list[dict[str, str]]) -> str:
    if path not in files:
        return f"Could not edit file: {path}. Error code: ENOENT."
    for edit in edits:
        if files[path].count(edit["oldText"]) != 1:
            return RECORDED["tool_results"]["edit missing"].replace("backup.conf", path)
        files[path] = files[path].replace(edit["oldText"], edit["newText"])
    return f"Successfully replaced {len(edits)} block(s) in {path}."


def run_tool(files: dict[str, str], call: Call) -> str:
    """Apply `call` to `files` (path to text, changed in place) and return the text pi would answer."""
    given = call.arguments
    try:
        if call.name == "bash":
            return _bash(files, given["command"])
        if call.name == "read":
            missing = f"ENOENT: no such file or directory, access '/workspace/{given['path']}'"
            return files.get(given["path"], missing)
        if call.name == "write":
            files[given["path"]] = given["content"]
            return f"Successfully wrote to {given['path']}"
        if call.name == "edit":
            return _edit(files, given["path"], given["edits"])
    except (KeyError, TypeError, AttributeError) as error:
        return f'Validation failed for tool "{call.name}":\n  - {error}'
    return f"Tool {call.name} not found"


def solved(chore: Chore, files: dict[str, str]) -> bool:
    """Whether `files` are what the chore's hidden test accepts."""
    right = all(files.get(path, "").rstrip("\n") == text.rstrip("\n") for path, text in chore.expected.items())
    return right and all(path in files for path in chore.expected) and not any(path in files for path in chore.absent)
