"""pi, the coding agent of earendil-works, over chat completions.

Measured with 1.6.0: 1.3 to 1.4 CPU-s a rollout of three calls, a first prompt of about 1,400 tokens, four tools.
"""

import json

from evener import catalogue
from evener_runner.harnesses.entry import Access, Harness

_MAX_TOKENS = 4096
_MINIMAL = ["--system-prompt", "You are pi.", "-nc", "-ns", "-ne", "-np", "--no-themes", "--no-session", "--no-mcp"]


def _files(access: Access) -> dict[str, bytes]:
    model = {
        "id": access.model,
        "name": access.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": access.window,
        "maxTokens": min(_MAX_TOKENS, access.window),
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {"baseUrl": f"{access.base_url}/v1", "api": "openai-completions", "apiKey": access.key, "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"proxy": provider}}).encode()}


def _argv(profile: str, access: Access) -> list[str]:
    flags = _MINIMAL if profile == "minimal" else []
    return ["/opt/evener/pi/bin/pi", "--provider", "proxy", "--model", access.model, *flags, "-p"]


PI = Harness(
    name=catalogue.PI.name,
    dialect=catalogue.PI.dialect,
    package="@earendil-works/pi-coding-agent",
    version=catalogue.PI.version,
    profiles=catalogue.PI.profiles,
    files=_files,
    env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
    argv=_argv,
    quirks=(
        "exits with 0 after a context-length error",
        "serialises tool arguments anew when it sends the history back",
        "gives up on an answer that does not start within 300 s",
        "names its own folder and the working directory in the system prompt",
    ),
)
