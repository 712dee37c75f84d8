"""The agents that are tested: how each is installed and pointed at the proxy, without a change and without its install scripts.

They are entries of the runner's own kind, so that what runs here is what the runner would do. Agents of npm are installed by
the runner's code; one of PyPI is laid where that code looks for it. The key is in a file of HOME, in no argument.
"""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evener.catalogue import Dialect
from evener.sandbox import interpreter
from evener_runner import compile_cache, install
from evener_runner.harnesses import Access, Harness
from evener_runner.harnesses.pi import PI

_ACCESS = ".access"
_WITH_ACCESS = ["/bin/sh", "-c", f'. "$HOME/{_ACCESS}" && exec "$@"', "sh"]
"""Starts what follows with the variables of a file; none of these agents takes its key from a file of its own alone."""


@dataclass(frozen=True)
class Agent:
    """A harness, and what a script has to know to speak to it.

    ``shell`` runs a command given as ``command``. ``ends_with``: the command that ends the work; "" where a text does.
    ``options`` are fields of a call that the agent's schema asks for.
    """

    id: str
    harness: Harness
    shell: str
    command: str = "command"
    ends_with: str = ""
    options: dict[str, object] = field(default_factory=dict)
    python: bool = False

    def arguments(self, command: str) -> str:
        """A call's arguments as a model may write them: JSON, spaced as no program would."""
        pairs = (
            f"{json.dumps(name)} :  {json.dumps(value)}" for name, value in {self.command: command, **self.options}.items()
        )
        return "{ " + " ,\n ".join(pairs) + "}"


def _pi(dialect: Dialect, api: str, path: str) -> Agent:
    def files(access: Access) -> dict[str, bytes]:
        written = json.loads(PI.files(access)[".pi/agent/models.json"])
        provider = written["providers"]["proxy"]
        provider |= {"api": api, "baseUrl": access.base_url + path}
        provider["models"][0] |= {"reasoning": True}
        return {".pi/agent/models.json": json.dumps(written).encode()}

    return Agent(f"pi-{dialect}", dataclasses.replace(PI, dialect=dialect, files=files), "bash")


def _variables(**variables: Callable[[Access], str]) -> Callable[[Access], dict[str, bytes]]:
    return lambda access: {_ACCESS: "".join(f"export {name}='{value(access)}'\n" for name, value in variables.items()).encode()}


_claude_files = _variables(
    ANTHROPIC_API_KEY=lambda access: access.key,
    ANTHROPIC_BASE_URL=lambda access: access.base_url,
    ANTHROPIC_MODEL=lambda access: access.model,
)


def _claude_argv(_: str, __: Access) -> list[str]:
    wrapper = "/opt/evener/claude-code/lib/node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
    return [*_WITH_ACCESS, "node", wrapper, "-p", "--dangerously-skip-permissions", "--output-format", "text"]


_CODEX_CONFIG = """
model = "{model}"
model_provider = "proxy"
check_for_update_on_startup = false

[model_providers.proxy]
name = "proxy"
base_url = "{base_url}/v1"
env_key = "SESSION_KEY"
wire_api = "responses"

[analytics]
enabled = false

[otel]
exporter = "none"
"""


def _codex_files(access: Access) -> dict[str, bytes]:
    config = _CODEX_CONFIG.format(model=access.model, base_url=access.base_url)
    return {**_variables(SESSION_KEY=lambda access: access.key)(access), ".codex/config.toml": config.encode()}


def _codex_argv(_: str, __: Access) -> list[str]:
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [*_WITH_ACCESS, "/opt/evener/codex/bin/codex", "exec", *flags, "-"]


_GEMINI_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
    "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "checkpointing": {"enabled": False}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "tools": {"sandbox": False},
}


def _gemini_files(access: Access) -> dict[str, bytes]:
    variables = _variables(GEMINI_API_KEY=lambda access: access.key, GOOGLE_GEMINI_BASE_URL=lambda access: access.base_url)
    return {**variables(access), ".gemini/settings.json": json.dumps(_GEMINI_SETTINGS).encode()}


def _gemini_argv(_: str, access: Access) -> list[str]:
    return [*_WITH_ACCESS, "/opt/evener/gemini-cli/bin/gemini", "--model", access.model, "--approval-mode", "yolo"]


def _gemini_routed_argv(_: str, __: Access) -> list[str]:
    """Without a model's name it asks a model which to take."""
    return [*_WITH_ACCESS, "/opt/evener/gemini-cli/bin/gemini", "--approval-mode", "yolo"]


_mini_files = _variables(
    OPENAI_API_KEY=lambda access: access.key,
    OPENAI_BASE_URL=lambda access: access.base_url + "/v1",
    OPENAI_API_BASE=lambda access: access.base_url + "/v1",
)


def _mini_argv(_: str, access: Access) -> list[str]:
    flags = f"-y --exit-immediately -m openai/{access.model} -o /tmp/trajectory.json -l 0"
    python = interpreter.executable()
    return [*_WITH_ACCESS, "/bin/sh", "-c", f'exec {python} -m minisweagent.run.mini {flags} -t "$(cat)"']


def _opencode_files(access: Access) -> dict[str, bytes]:
    model = {"name": access.model, "limit": {"context": access.window, "output": 4096}, "tool_call": True}
    options = {"baseURL": access.base_url + "/v1", "apiKey": access.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "proxy", "options": options, "models": {access.model: model}}
    config = {"autoupdate": False, "share": "disabled", "provider": {"proxy": provider}, "permission": {"*": "allow"}}
    config |= dict.fromkeys(("model", "small_model"), f"proxy/{access.model}")
    return {".config/opencode/opencode.json": json.dumps(config).encode()}


def _opencode_argv(profile: str, access: Access) -> list[str]:
    return [*_opencode_untitled_argv(profile, access), "--title", "task"]


def _opencode_untitled_argv(_: str, access: Access) -> list[str]:
    """Without a title it asks a model for one."""
    # What npm links as `opencode` is put there by the install script.
    package = {"x86_64": "opencode-linux-x64-baseline", "aarch64": "opencode-linux-arm64"}[platform.machine()]
    binary = f"/opt/evener/opencode/lib/node_modules/opencode-ai/node_modules/{package}/bin/opencode"
    return [binary, "run", "-m", f"proxy/{access.model}"]


_qwen_variables = _variables(
    OPENAI_API_KEY=lambda access: access.key,
    OPENAI_BASE_URL=lambda access: access.base_url + "/v1",
    OPENAI_MODEL=lambda access: access.model,
)


def _qwen_files(access: Access) -> dict[str, bytes]:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False, "disableUpdateNag": True},
    }
    return {**_qwen_variables(access), ".qwen/settings.json": json.dumps(settings).encode()}


def _qwen_argv(_: str, __: Access) -> list[str]:
    return [*_WITH_ACCESS, "/opt/evener/qwen-code/bin/qwen", "--yolo"]


def _harness(name: str, dialect: Dialect, package: str, version: str, **fields: object) -> Harness:
    return Harness(name=name, dialect=dialect, package=package, version=version, profiles=("default",), **fields)  # type: ignore[arg-type]


CLAUDE = _harness(
    "claude-code",
    "anthropic",
    "@anthropic-ai/claude-code",
    "2.1.332",
    files=_claude_files,
    env={
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    },
    argv=_claude_argv,
)
CODEX = _harness("codex", "responses", "@openai/codex", "0.171.0", files=_codex_files, env={}, argv=_codex_argv)
GEMINI = _harness(
    "gemini-cli",
    "gemini",
    "@google/gemini-cli",
    "0.61.0",
    files=_gemini_files,
    env={"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"},
    argv=_gemini_argv,
)
MINI = _harness(
    "mini-swe-agent",
    "chat",
    "mini-swe-agent",
    "2.4.6",
    files=_mini_files,
    env={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mswea",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": "/opt/evener/mini-swe-agent",
    },
    argv=_mini_argv,
)
OPENCODE = _harness(
    "opencode",
    "chat",
    "opencode-ai",
    "1.18.33",
    files=_opencode_files,
    env=dict.fromkeys(
        (
            "OPENCODE_DISABLE_AUTOUPDATE",
            "OPENCODE_DISABLE_LSP_DOWNLOAD",
            "OPENCODE_DISABLE_MODELS_FETCH",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS",
        ),
        "1",
    ),
    argv=_opencode_argv,
)
QWEN = _harness("qwen-code", "chat", "@qwen-code/qwen-code", "0.24.4", files=_qwen_files, env={}, argv=_qwen_argv)

AGENTS = (
    _pi("chat", "openai-completions", "/v1"),
    _pi("anthropic", "anthropic-messages", ""),
    _pi("responses", "openai-responses", "/v1"),
    _pi("gemini", "google-generative-ai", "/v1beta"),
    Agent("claude-code", CLAUDE, "Bash"),
    Agent("codex", CODEX, "exec_command", command="cmd"),
    Agent("gemini-cli", GEMINI, "run_shell_command"),
    Agent("opencode", OPENCODE, "bash", options={"description": "Runs a command"}),
    Agent("qwen-code", QWEN, "run_shell_command", options={"description": "Runs a command", "is_background": False}),
    Agent("mini-swe-agent", MINI, "bash", ends_with="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", python=True),
)
SIDE_CALLERS = (
    Agent("gemini-cli without a model", dataclasses.replace(GEMINI, argv=_gemini_routed_argv), "run_shell_command"),
    Agent(
        "opencode without a title",
        dataclasses.replace(OPENCODE, argv=_opencode_untitled_argv),
        "bash",
        options={"description": "Runs a command"},
    ),
)
"""Agents as they are started where they ask something beside the conversation."""


def selected(among: Sequence[Agent] = AGENTS) -> list[Agent]:
    """The agents that ``HARNESSES`` names, ``pi`` for all of pi's dialects; all where it is unset or says ``all``."""
    names = os.environ.get("HARNESSES", "all").split()
    if names == ["all"]:
        return list(among)
    known = {name for agent in AGENTS for name in (agent.id, agent.harness.name)}
    if unknown := sorted(set(names) - known):
        raise SystemExit(f"HARNESSES: unknown: {' '.join(unknown)}; known: {' '.join(sorted(known))}")
    return [agent for agent in among if agent.id in names or agent.harness.name in names]


async def install_agent(agent: Agent, cache: Path, progress: install.Progress) -> None:
    """Install an agent where it is absent. Raises InfraError ``harness_missing``."""
    if not agent.python:
        await install.ensure(agent.harness, cache, progress)
        return
    harness = agent.harness

    async def fetch(part: Path) -> Path:
        progress(f"{harness.name} {harness.version}: fetching")
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--only-binary=:all:"]
        await install.run_installer([*pip, "--target", str(part), f"{harness.package}=={harness.version}"], os.environ)
        return part

    async def nothing(part: Path) -> Path:
        return part

    await install.make_once(install.folders(harness, cache).prefix, fetch)
    await install.make_once(compile_cache.folder("bubblewrap", harness, cache), nothing)  # which only Node makes
