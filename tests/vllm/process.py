"""Engines as processes of their own: our CPU engine, and vLLM with the flags that compose/compose.gpu.yaml gives it.

vLLM's Python is named by ``EVENER_TEST_VLLM``, which ``make test-vllm`` sets. Processes are stopped by group, since vLLM
has children of its own.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
VLLM = "EVENER_TEST_VLLM"
MODEL = "policy"
START_S = 900.0
"""vLLM on the CPU starts three processes one after another, each of which imports for 20 s on an idle core."""


def engines() -> list[str]:
    """The engines that this run of the tests has."""
    return ["cpu", "vllm"] if os.environ.get(VLLM) else ["cpu"]


@dataclass
class EngineProcess:
    """An engine that serves a policy folder; started with the same weights each time."""

    kind: str
    policy: Path
    log: Path
    port: int = field(default_factory=lambda: free_port())
    _child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers. Raises RuntimeError with the end of its log."""
        argv, env = (_vllm if self.kind == "vllm" else _cpu)(self.policy, self.port)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                argv, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(self.url + "/health", timeout=5):
                return
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"{' '.join(argv)} does not answer; its log ends:\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """End it and its children at once."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(20)
        self._child = None


@contextlib.contextmanager
def running(kind: str, policy: Path, folder: Path) -> Iterator[EngineProcess]:
    """An engine for as long as the ``with``; its log is in ``folder``."""
    process = EngineProcess(kind, policy, folder / f"{kind}.log")
    try:
        process.start()
        yield process
    finally:
        process.kill()


def gpu_flags() -> list[str]:
    """The flags of vLLM in compose/compose.gpu.yaml, variables at their defaults, without the place it serves from."""
    document = yaml.load((ROOT / "compose" / "compose.gpu.yaml").read_text(), _ComposeLoader)
    flags = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", flag) for flag in document["services"]["engine"]["command"]]
    return [flag for flag in flags if flag.split("=")[0] not in ("--model", "--host", "--port")]


class _ComposeLoader(yaml.SafeLoader):
    """YAML with compose's own tags."""


def _reset(*_: Any) -> None:
    return None


_ComposeLoader.add_constructor("!reset", _reset)


def _cpu(policy: Path, port: int) -> tuple[list[str], dict[str, str]]:
    argv = [sys.executable, "-m", "evener_engine", "--policy", str(policy), "--port", str(port), "--name", MODEL]
    return argv, {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


def _vllm(policy: Path, port: int) -> tuple[list[str], dict[str, str]]:
    server = [os.environ[VLLM], "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy)]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    # Compilation takes minutes on a CPU; float32 is what the reference computes in.
    cpu = ["--enforce-eager", "--dtype", "float32"]
    env = {
        "PYTHONPATH": "",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return [*server, *place, *gpu_flags(), *cpu], env
