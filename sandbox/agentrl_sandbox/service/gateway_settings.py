"""Settings of the gateway, and how a command reads settings from the environment and from ``key=value`` arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl_sandbox.types import SandboxError

NO_TOKEN = "none"
_RENAMED = {"patience": "retry_deadline"}
_REMOVED = {"standby": "a fork server that died is replaced by a new one"}

_Model = TypeVar("_Model", bound=BaseModel)


class ServiceSettingsError(SandboxError):
    """A command was given invalid settings; the message names them."""


class GatewaySettings(BaseModel):
    """Where the gateway listens, whom it admits and how much work it accepts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65_535, description="port to listen on; 0 picks a free port")
    token: str | None = Field(
        None,
        min_length=1,
        repr=False,
        description="bearer token; unset: one is generated; 'none' turns authentication off",
    )
    token_file: Path | None = Field(
        None, description="file in which a generated token is stored; unset: it is logged once"
    )
    allowed_hosts: str = Field(
        "", description="accepted names in the Host header besides 127.0.0.1 and localhost, comma-separated"
    )
    max_body_mb: int = Field(32, ge=1, le=60, description="maximum size of a request body in megabytes")
    receive_seconds: float = Field(
        60.0, gt=0, description="seconds within which the body of a request must arrive; for its headers, 10"
    )
    queue_limit: int = Field(4096, ge=0, description="calls that may wait for a runner; further calls get 429")
    queue_seconds: float = Field(
        300.0, gt=0, description="seconds that a call may wait for a runner before it gets 503"
    )
    batch_limit: int = Field(1024, ge=1, description="maximum number of programs in one batch")
    drain_seconds: float = Field(
        60.0, ge=0, description="seconds that the gateway waits for running calls after SIGTERM"
    )

    @property
    def hosts(self) -> frozenset[str]:
        """Every name accepted in a Host header."""
        more = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        own = set() if self.host in ("0.0.0.0", "::") else {self.host.lower()}
        return frozenset({"127.0.0.1", "localhost", "::1", *own, *more})


def read_settings(
    model: type[_Model], environment: Mapping[str, str], arguments: Iterable[str], *, without: Iterable[str] = ()
) -> _Model:
    """A model from variables ``SANDBOX_NAME`` that are not empty, and arguments ``name=value``, which win.

    The fields ``without`` cannot be set. Raises ServiceSettingsError.
    """
    arguments = list(arguments)
    given = {argument.partition("=")[0] for argument in arguments}
    for old, new in _RENAMED.items():
        if environment.get(f"SANDBOX_{old.upper()}"):
            raise ServiceSettingsError(f"SANDBOX_{old.upper()} has a new name: SANDBOX_{new.upper()}")
        if old in given:
            raise ServiceSettingsError(f"the setting {old} has a new name: {new}")
    for old, why in _REMOVED.items():
        if old in given or environment.get(f"SANDBOX_{old.upper()}"):
            raise ServiceSettingsError(f"the setting {old} was removed: {why}")
    names = [name for name in model.model_fields if name not in set(without)]
    values = {name: text for name in names if (text := environment.get(f"SANDBOX_{name.upper()}"))}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or name not in names:
            raise ServiceSettingsError(
                f"{argument!r} is not a setting; valid: {', '.join(f'{name}=' for name in names)}"
            )
        values[name] = text
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ServiceSettingsError(f"{where}={values.get(where)!r}: {first['msg']}") from error
