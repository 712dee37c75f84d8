"""Child processes of a measurement: started, awaited, weighed by /proc, and ended by their id."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.proxy.client import Connection

START_S = 300.0  # on a machine that many share
STOP_S = 20.0
ROOT = Path(__file__).parents[2]
_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A child whose output goes to a file in ``folder``."""

    def __init__(self, name: str, argv: list[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as output:
            self._child = subprocess.Popen(
                argv, cwd=folder, env=os.environ | dict(env or {}), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pid = self._child.pid

    @property
    def cpu_s(self) -> float:
        """User and system seconds since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    @property
    def rss_mb(self) -> float:
        """Resident memory in MB."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    async def answers(self, port: int, path: str) -> None:
        """Wait until ``path`` answers 200. Raises RuntimeError with the end of its output."""
        connection = Connection(port)
        try:
            async with asyncio.timeout(START_S):
                while not await _is_ok(connection, path):
                    if self._child.poll() is not None:
                        raise RuntimeError(f"{self.name} ended with {self._child.returncode}: {self.output()}")
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise RuntimeError(f"{self.name} does not answer: {self.output()}") from error
        finally:
            connection.close()

    def output(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(errors="replace")[-1500:]

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._child.kill()
        self._child.wait(STOP_S)

    def stop(self) -> None:
        """Ask it to end, then insist."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()


async def _is_ok(connection: Connection, path: str) -> bool:
    try:
        return (await connection.request("GET", path))[0] == 200
    except (OSError, EOFError):
        return False


def python_env() -> dict[str, str]:
    """The environment in which a child finds this checkout's packages, installed or not."""
    folders = [str(ROOT), *(str(folder) for folder in sorted((ROOT / "services").iterdir()))]
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*folders, *([given] if given else [])])}


def module(name: str, *args: object) -> list[str]:
    """The argv of a module of this checkout."""
    return [sys.executable, "-m", name, *map(str, args)]
