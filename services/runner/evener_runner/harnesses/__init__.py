"""The agents that Evener can run, one file each."""

from evener.api import HarnessRef
from evener.errors import InfraError
from evener_runner.harnesses.entry import NODE, Access, Harness
from evener_runner.harnesses.pi import PI

HARNESSES: dict[str, Harness] = {harness.name: harness for harness in (PI,)}


def find(ref: HarnessRef, table: dict[str, Harness] = HARNESSES) -> Harness:
    """The entry that a lease names. Raises InfraError: this runner is older than the orchestrator that checked the name."""
    harness = table.get(ref.name)
    if harness is None or ref.profile not in harness.profiles:
        raise InfraError("harness_missing", f"{ref.name} with profile {ref.profile} is unknown to this runner")
    return harness


__all__ = ["HARNESSES", "NODE", "Access", "Harness", "find"]
