"""Settings of a sandbox and of its HTTP gateway, read from environment variables and command-line arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl_sandbox.types import SandboxError

_SERVICE_URL = re.compile(r"https?://[^\s/?#@,]+/?")
_OTHER_URL = re.compile(r"local://|ray://|docker://[^\s/]\S*")
_PLUGIN_URL = re.compile(r"([a-z][a-z0-9]*)://\S*")

PLUGINS = "agentrl.sandboxes"
"""Entry-point group of other sandboxes: SCHEME = "module:function". See `agentrl_sandbox.client.open_sandbox`."""


PROGRAM_LIMITS = ("memory_mb", "max_processes", "scratch_mb", "output_limit", "flood_limit")
"""Settings that can change the result of a program and thus of an evaluation."""
LIMITS = (*PROGRAM_LIMITS, "fetch_limit", "max_sessions", "session_idle_timeout")
"""Settings that limit programs and sessions. Clients can compare a service's limits but not change them."""


class SandboxSettings(BaseModel):
    """Location of the sandbox, and resource limits of programs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        "local://",
        description="sandbox that runs programs. local://: a fork server on this machine; docker://IMAGE: a "
        "container; http://HOST:PORT: a service, whose limits apply; ray://: a service on every node of "
        "the Ray cluster (cluster=ray); SCHEME://...: a sandbox from another package. Programs are "
        "distributed over several services, given as a list "
        "or separated by commas; if a service is lost, its calls are sent to the other services",
    )
    timeout: float = Field(10.0, gt=0, le=3600, description="seconds of wall-clock time for each program")
    memory_mb: int = Field(
        512,
        ge=16,
        description="megabytes of memory that a program may use beyond the interpreter; raise it if programs end as "
        "memory_limit",
    )
    max_processes: int = Field(
        32, ge=1, le=4096, description="maximum number of processes and threads of a program, including the first"
    )
    scratch_mb: int = Field(64, ge=1, description="size of a program's scratch directory in megabytes")
    output_limit: int = Field(
        65_536,
        ge=256,
        description="bytes of each output stream that are kept: half from the beginning, half from the end",
    )
    flood_limit: int = Field(
        16_777_216, ge=4096, description="bytes of output after which a program is killed as output_limit"
    )
    fetch_limit: int = Field(
        16_777_216, ge=0, le=1 << 29, description="maximum total bytes of the files that are returned from one program"
    )
    max_sessions: int = Field(64, ge=0, le=1024, description="maximum number of open sessions, including forks")
    session_idle_timeout: float = Field(
        600.0, gt=0, description="seconds without a program after which a session is closed"
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="maximum number of concurrent programs; unset: two per core, but at least 4 (for a service: 256)",
    )
    token: str | None = Field(
        None,
        repr=False,
        exclude=True,
        description="bearer token of a service, never logged or saved; unset: the environment variable SANDBOX_TOKEN",
    )
    retry_deadline: float = Field(
        300.0,
        gt=0,
        description="seconds, in addition to the program's time limit, for which a call to a busy or unreachable "
        "service is retried; a call that still fails counts as an infrastructure failure",
    )
    service_deadline: float = Field(
        30.0,
        gt=0,
        description="with several services: seconds without a response after which a service counts as lost. Its "
        "calls are then sent to the other services, and its sessions end",
    )
    first_user: int | None = Field(
        None,
        ge=1,
        le=4_000_000_000,
        description="lowest user id under which programs run if the sandbox is started by root, with one user for "
        "each worker and session; unset: a random id far above the system's users",
    )
    allow_unisolated: bool = Field(
        False, description="run programs even if an isolation property is missing on this machine"
    )

    @field_validator("url", mode="before")
    @classmethod
    def _join_addresses(cls, url: object) -> object:
        return ",".join(map(str, url)) if isinstance(url, list | tuple) else url

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        addresses = [part.strip() for part in url.split(",")]
        if not _OTHER_URL.fullmatch(url) and not all(map(_SERVICE_URL.fullmatch, addresses)):
            schemes = sorted(entry.name for entry in entry_points(group=PLUGINS))
            match = _PLUGIN_URL.fullmatch(url)
            if match is None or match[1] not in schemes:
                installed = "".join(f", {scheme}://" for scheme in schemes)
                raise ValueError(
                    f"unknown sandbox {url!r}; valid: local://, docker://IMAGE, http://HOST:PORT (comma-separated), "
                    f"ray://{installed}"
                )
            return url
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"the same address occurs twice in {url!r}")
        return ",".join(addresses)

    @property
    def addresses(self) -> list[str]:
        """Addresses in ``url``, several for a list of services."""
        return self.url.split(",")

    @property
    def scheme(self) -> str:
        """Scheme of ``url``: ``local``, ``docker``, ``ray``, ``http``, ``https`` or a plug-in's scheme."""
        return self.url.partition("://")[0]

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent programs."""
        if self.workers is not None:
            return self.workers
        return max(4, 2 * len(os.sched_getaffinity(0)))


NO_TOKEN = "none"
_FORMER_SETTINGS = {
    "patience": "was renamed to retry_deadline",
    "standby": "was removed: a fork server that exits is restarted automatically",
    "batch_limit": "was removed: send programs to /v1/execute concurrently instead of in batches",
}

_Model = TypeVar("_Model", bound=BaseModel)


class ServiceSettingsError(SandboxError):
    """A command's settings are invalid."""


class GatewaySettings(BaseModel):
    """Settings of the gateway: address, authentication and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65_535, description="port to listen on; 0 picks a free port")
    token: str | None = Field(
        None,
        min_length=1,
        repr=False,
        description="bearer token; unset: a generated token; 'none': no authentication",
    )
    token_file: Path | None = Field(
        None, description="file in which a generated token is stored; unset: the token is logged once"
    )
    allowed_hosts: str = Field(
        "", description="accepted names in the Host header in addition to 127.0.0.1 and localhost, separated by commas"
    )
    max_body_mb: int = Field(32, ge=1, le=60, description="maximum size of a request body in megabytes")
    receive_seconds: float = Field(
        60.0,
        gt=0,
        description="seconds within which the body of a request must arrive; the limit for headers is 10 seconds",
    )
    queue_limit: int = Field(4096, ge=0, description="calls that may wait for a runner; others are rejected (429)")
    queue_seconds: float = Field(
        300.0, gt=0, description="seconds that a call may wait for a runner before it is rejected (503)"
    )
    drain_seconds: float = Field(
        60.0, ge=0, description="seconds that the gateway waits for running calls after SIGTERM"
    )

    @property
    def hosts(self) -> frozenset[str]:
        """All accepted names in a Host header."""
        more = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        own_host = set() if self.host in ("0.0.0.0", "::") else {self.host.lower()}
        return frozenset({"127.0.0.1", "localhost", "::1", *own_host, *more})


def read_settings(
    model: type[_Model], environment: Mapping[str, str], arguments: Iterable[str], *, without: Iterable[str] = ()
) -> _Model:
    """Read settings from nonempty variables ``SANDBOX_NAME`` and arguments ``name=value``. Arguments take precedence.

    Fields in ``without`` cannot be set. Raises ServiceSettingsError if a setting is invalid.
    """
    arguments = list(arguments)
    given = {argument.partition("=")[0] for argument in arguments}
    for name, change in _FORMER_SETTINGS.items():
        if name in given or environment.get(f"SANDBOX_{name.upper()}"):
            raise ServiceSettingsError(f"the setting {name} (variable SANDBOX_{name.upper()}) {change}")
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
