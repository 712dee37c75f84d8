"""Everything that differs between a laptop and a cluster is one of these settings, read from the environment once.

A setting ``x`` is the variable ``EVENER_X``, else the file ``evener_x`` in the folder of `SECRETS_DIR`, which is how compose
and Kubernetes hand out secrets. The defaults are the embedded stack: SQLite, an in-process bus and cache, a folder of blobs,
every port on the loopback.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from evener.errors import InputError

SECRETS_DIR = "EVENER_SECRETS_DIR"
"""The variable that names the folder of secret files; unset: `DEFAULT_SECRETS`, where it exists."""

DEFAULT_SECRETS = Path("/run/secrets")

SandboxKind = Literal["auto", "bubblewrap", "docker", "process"]


class Settings(BaseSettings):
    """The settings of every service; each reads the ones it needs."""

    model_config = SettingsConfigDict(env_prefix="EVENER_", extra="ignore", frozen=True)

    data: Path = Field(default=Path(".evener"), description="folder of the embedded stack's state")
    cache: Path = Field(
        default=Path("~/.cache/evener").expanduser(), description="folder of what can be fetched again: harnesses, Node"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    host: str = Field(default="127.0.0.1", description="address that this service listens on")
    api_port: int = Field(default=8700, ge=0, le=65535)
    proxy_port: int = Field(default=8701, ge=0, le=65535)
    admin_port: int = Field(default=8702, ge=0, le=65535)
    engine_port: int = Field(default=8703, ge=0, le=65535)
    health_port: int = Field(default=8704, ge=0, le=65535, description="health of a runner, verifier or learner; 0: none")

    url: str | None = Field(default=None, description="the orchestrator's API; unset: the embedded stack")
    proxy_url: str | None = Field(default=None, description="the proxy's agent side, as a runner reaches it")
    admin_url: str | None = Field(default=None, description="the proxy's admin side")
    engine_urls: list[str] = Field(default=[], description="the engines of the policy, as a JSON list")
    engine_key: SecretStr | None = Field(default=None, description="bearer token of the engines, where they want one")
    engine_model: str | None = Field(default=None, description="the model to ask for, where the engines list several")
    api_token: SecretStr = Field(default=SecretStr(""), description="bearer token of the API")
    admin_token: SecretStr = Field(default=SecretStr(""), description="bearer token of the proxy's admin side")

    database_url: str | None = Field(default=None, description="unset: SQLite in the data folder")
    redis_url: str | None = Field(default=None, description="unset: in-process")
    amqp_url: str | None = Field(default=None, description="unset: in-process")
    blobs_url: str | None = Field(default=None, description="any fsspec URL; unset: the data folder")

    policy: str | None = Field(default=None, description="the policy that a learner trains; unset: those of the API's runs")
    sandbox: SandboxKind = Field(default="auto", description="what this host insists on; auto: what a run asks for")
    runner_slots: int = Field(default=8, ge=1, description="agents that a runner runs at once")
    verifier_slots: int = Field(default=4, ge=1, description="workspaces that a verifier scores at once")
    grader_root: Path | None = Field(default=None, description="a folder that graders find at /opt/grader, read-only")
    grader_images: Path | None = Field(
        default=None, description="a folder of graders' root filesystems, at their images' names"
    )
    lease_s: float = Field(default=30.0, gt=0, description="a claim without a heartbeat for this long expires")
    drain_s: float = Field(default=5.0, ge=0, description="how long a stopped service may finish what it has in hand")

    @property
    def api(self) -> str:
        """URL of the API."""
        return self.url or f"http://127.0.0.1:{self.api_port}"

    @property
    def proxy(self) -> str:
        """URL of the proxy's agent side."""
        return self.proxy_url or f"http://127.0.0.1:{self.proxy_port}"

    @property
    def admin(self) -> str:
        """URL of the proxy's admin side."""
        return self.admin_url or f"http://127.0.0.1:{self.admin_port}"

    @property
    def engines(self) -> list[str]:
        """URLs of the engines."""
        return self.engine_urls or [f"http://127.0.0.1:{self.engine_port}"]

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the ledger."""
        return self.database_url or f"sqlite:///{self.data.absolute()}/ledger.db"

    @property
    def blobs(self) -> str:
        """URL of the blob store."""
        return self.blobs_url or str(self.data.absolute() / "blobs")


def load() -> Settings:
    """The settings of this process. Raises InputError that names the variable."""
    given = os.environ.get(SECRETS_DIR)
    secrets = Path(given) if given else DEFAULT_SECRETS
    if given and not secrets.is_dir():
        raise InputError("settings_invalid", f"{SECRETS_DIR}: {secrets} is not a folder")
    make: Any = Settings  # pydantic's `_secrets_dir` is no field, and type checkers see fields alone
    try:
        return make(_secrets_dir=secrets if secrets.is_dir() else None)
    except ValidationError as error:
        first = error.errors()[0]
        name = "EVENER_" + "_".join(str(part) for part in first["loc"]).upper()
        raise InputError("settings_invalid", f"{name}: {first['msg']}") from error
