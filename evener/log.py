"""Logs are JSON lines on stderr, each with the service's name and the ids of what it is about; secrets never enter one.

A key named like a secret is masked whatever its value, so that a careless call cannot leak one. Used by every service.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

_SECRET = re.compile(r"(^|_)(key|token|secret|password|authorization|lease)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a key is named like a secret."""
    return _SECRET.search(name) is not None


def mask_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the value of every key that is named like a secret."""
    for name in event:
        if is_secret(name):
            event[name] = "***"
    return event


def configure(*, level: str = "INFO", path: Path | None = None) -> None:
    """Send this process's logs to ``path`` (appended), else to stderr. Call it once, before the first log line."""
    file = sys.stderr if path is None else path.open("a", buffering=1)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask_secrets,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file=file),
        cache_logger_on_first_use=False,
    )


def get(service: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of one service."""
    return structlog.get_logger(service=service)
