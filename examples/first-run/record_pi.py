"""Record the request that the unmodified pi sends, so that the policy can be built without Node.

Invariant: pi_prompt.json holds what pi said, byte for byte: its system prompt, its tools, and the texts of its tool
results for calls that succeed and that fail. Run by hand after pi's pinned version changes:

    python record_pi.py --pi PREFIX --node NODE_PREFIX

PREFIX is where npm installed `@earendil-works/pi-coding-agent` (it has bin/pi), NODE_PREFIX a Node 24 (it has
bin/node). pi's system prompt names pi's own folder and the working directory, so both are bound to the places they
have in Evener's sandbox: /opt/evener/pi, /opt/evener/node, /workspace, and HOME=/home/agent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = {
    "id": "policy",
    "name": "policy",
    "reasoning": False,
    "input": ["text"],
    "contextWindow": 32768,
    "maxTokens": 4096,
    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
}
FILES = {"backup.conf": "what = mail\nevery = day\n", "inbox/note.txt": "A note from Anna.\n", "today/.keep": ""}
# What the scripted model asks for, one call a turn; pi's answers are the tool results to learn from.
SCRIPT: list[tuple[str, str, dict[str, Any]]] = [
    ("list", "bash", {"command": "ls"}),
    ("read", "read", {"path": "backup.conf"}),
    ("read missing", "read", {"path": "nothing.txt"}),
    ("move", "bash", {"command": "mv inbox/note.txt today"}),
    ("move missing", "bash", {"command": "mv inbox/note.txt today"}),
    ("edit", "edit", {"path": "backup.conf", "edits": [{"oldText": "day", "newText": "week"}]}),
    ("edit missing", "edit", {"path": "backup.conf", "edits": [{"oldText": "day", "newText": "week"}]}),
    ("write", "write", {"path": "team.txt", "content": "money"}),
    ("write without content", "write", {"path": "team.txt"}),
    ("unknown tool", "find", {"path": "team.txt"}),
]


class _ScriptedModel(BaseHTTPRequestHandler):
    """Answers the k-th request with the k-th call of SCRIPT, then with a final text; keeps the last request."""

    protocol_version = "HTTP/1.1"
    last: dict[str, Any]

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).last = body
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        delta: dict[str, Any] = {"role": "assistant", "content": "Done."}
        if turn < len(SCRIPT):
            _, name, arguments = SCRIPT[turn]
            function = {"name": name, "arguments": json.dumps(arguments)}
            delta = {"tool_calls": [{"index": 0, "id": f"call_{turn}", "type": "function", "function": function}]}
        finish = "tool_calls" if turn < len(SCRIPT) else "stop"
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        chunks = [
            head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            head | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        ]
        payload = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload.encode())


def _run_pi(pi: Path, node: Path, port: int, folder: Path) -> None:
    workspace, home = folder / "workspace", folder / "home"
    for path, text in FILES.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(text)
    settings = home / ".pi/agent/models.json"
    settings.parent.mkdir(parents=True)
    provider = {"baseUrl": f"http://127.0.0.1:{port}/v1", "api": "openai-completions", "apiKey": "k", "models": [MODEL]}
    settings.write_text(json.dumps({"providers": {"proxy": provider}}))
    box = ["bwrap", "--unshare-pid", "--die-with-parent", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
    box += ["--tmpfs", "/tmp", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
    for name in ("bin", "lib", "lib64"):
        box += ["--symlink", f"usr/{name}", f"/{name}"]
    box += ["--ro-bind", str(pi), "/opt/evener/pi", "--ro-bind", str(node), "/opt/evener/node"]
    box += ["--bind", str(workspace), "/workspace", "--bind", str(home), "/home/agent", "--chdir", "/workspace"]
    environment = {"HOME": "/home/agent", "PATH": "/opt/evener/node/bin:/usr/bin:/bin", "PI_OFFLINE": "1"}
    for name, value in (environment | {"PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}).items():
        box += ["--setenv", name, value]
    argv = ["/opt/evener/pi/bin/pi", "--provider", "proxy", "--model", "policy", "-p", "Do it."]
    subprocess.run(box + argv, check=True, timeout=120, stdin=subprocess.DEVNULL)


def main() -> None:
    """Run pi once against the scripted model and write pi_prompt.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pi", type=Path, required=True)
    parser.add_argument("--node", type=Path, required=True)
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ScriptedModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        _run_pi(arguments.pi, arguments.node, server.server_address[1], Path(folder))
    server.shutdown()
    request = _ScriptedModel.last
    package = next(arguments.pi.glob("lib/node_modules/@earendil-works/pi-coding-agent/package.json"))
    results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
    recorded = {
        "pi": json.loads(package.read_text())["version"],
        "system": request["messages"][0]["content"],
        "tools": request["tools"],
        "other_fields": {key: value for key, value in request.items() if key not in ("messages", "tools", "model")},
        "tool_results": {label: text for (label, _, _), text in zip(SCRIPT, results, strict=True)},
    }
    (HERE / "pi_prompt.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
