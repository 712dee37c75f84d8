"""All that Evener knows of one coding agent: how to install it, point it at the proxy and start it. The agent is not changed.

An entry says nothing about sandboxes: paths are those of the port, files lie below HOME, and the instruction goes in on
stdin. The key stands in a file that the agent reads, never in its arguments. Read by the runner and by ``evener harnesses``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from evener.catalogue import Dialect

NODE = "/opt/evener/node"
"""Where the sandbox has Node."""


@dataclass(frozen=True, slots=True)
class Access:
    """The model as an agent sees it. ``window`` is in tokens; ``base_url`` has no path."""

    base_url: str
    key: str
    model: str
    window: int


@dataclass(frozen=True, slots=True)
class Harness:
    """One agent at one pinned version, from npm.

    ``files`` maps paths below HOME to contents; ``argv`` takes the profile. ``quirks`` are facts about the agent that explain
    what one sees in its traces.
    """

    name: str
    dialect: Dialect
    package: str
    version: str
    profiles: tuple[str, ...]
    files: Callable[[Access], dict[str, bytes]]
    env: dict[str, str]
    argv: Callable[[str, Access], list[str]]
    quirks: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """Where the sandbox has the agent: npm's prefix, with ``bin/`` and ``lib/``."""
        return f"/opt/evener/{self.name}"
