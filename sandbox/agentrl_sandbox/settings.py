"""Settings of the sandbox, with defaults and bounds."""

from __future__ import annotations

import os
import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

_SERVICE = re.compile(r"https?://[^\s/?#@,]+/?")
_PLACE = re.compile(r"local://|ray://|docker://[^\s/]\S*")


LIMITS = (
    *("memory_mb", "max_processes", "scratch_mb", "output_limit", "flood_limit"),
    *("fetch_limit", "max_sessions", "session_idle_timeout"),
)
"""The settings that limit programs and sessions. A service has its own, which its clients can only compare."""


class SandboxSettings(BaseModel):
    """Where programs run and how much each may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        "local://",
        description="where programs run: local:// starts a fork server on this machine, docker://IMAGE starts a "
        "container, http://HOST:PORT uses a service, whose own limits apply; several addresses of services, as a "
        "list or with commas between them, share the programs, and calls of a lost service go to the others; ray:// "
        "starts a service on every node of the Ray cluster (cluster=ray)",
    )
    timeout: float = Field(10.0, gt=0, le=3600, description="seconds of wall clock time for each program")
    memory_mb: int = Field(
        512,
        ge=16,
        description="megabytes of memory that a program may use beyond the interpreter; raise it if programs end as "
        "memory_limit",
    )
    max_processes: int = Field(
        32, ge=1, le=4096, description="processes and threads that a program may have, including its first"
    )
    scratch_mb: int = Field(64, ge=1, description="size of a program's scratch directory in megabytes")
    output_limit: int = Field(
        65_536, ge=256, description="bytes kept of each output stream: half from its beginning, half from its end"
    )
    flood_limit: int = Field(
        16_777_216, ge=4096, description="bytes of output after which a program is killed (output_limit)"
    )
    fetch_limit: int = Field(
        16_777_216, ge=0, le=1 << 29, description="bytes of all files that are returned from one program"
    )
    max_sessions: int = Field(64, ge=0, le=1024, description="sessions that may be open at once, including forks")
    session_idle_timeout: float = Field(
        600.0, gt=0, description="seconds after which a session that runs no program is closed"
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="programs that run at once; unset: two per core and at least 4 (for a service: 256)",
    )
    token: str | None = Field(
        None,
        repr=False,
        exclude=True,
        description="bearer token of a service, never logged or saved; unset: the variable SANDBOX_TOKEN",
    )
    retry_deadline: float = Field(
        300.0,
        gt=0,
        description="seconds for which a call to a busy or unreachable service is retried, beyond the program's own "
        "time; then it counts as an infrastructure failure",
    )
    service_deadline: float = Field(
        30.0,
        gt=0,
        description="of several services: seconds without an answer after which one counts as lost; its calls then go "
        "to the others and its sessions have ended",
    )
    first_user: int | None = Field(
        None,
        ge=1,
        le=4_000_000_000,
        description="number of the first user that programs run as, when started by root: one user for each worker and "
        "session; unset: drawn at random, far above the system's users",
    )
    allow_unisolated: bool = Field(
        False, description="run programs even if an isolation property is missing on this machine"
    )

    @field_validator("url", mode="before")
    @classmethod
    def _one_text(cls, url: object) -> object:
        return ",".join(map(str, url)) if isinstance(url, list | tuple) else url

    @field_validator("url")
    @classmethod
    def _known_url(cls, url: str) -> str:
        addresses = [part.strip() for part in url.split(",")]
        if not _PLACE.fullmatch(url) and not all(map(_SERVICE.fullmatch, addresses)):
            raise ValueError(
                f"unknown sandbox {url!r}; valid: local://, docker://IMAGE, http://HOST:PORT (several with commas), ray://"
            )
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"an address twice in {url!r}")
        return ",".join(addresses)

    @property
    def addresses(self) -> list[str]:
        """The parts of ``url``: of several services the address of each."""
        return self.url.split(",")

    @property
    def scheme(self) -> str:
        """``local``, ``docker``, ``ray``, ``http`` or ``https``."""
        return self.url.partition("://")[0]

    @property
    def slots(self) -> int:
        """The number of users that programs run as: one for each worker and each session."""
        return self.concurrency + self.max_sessions

    @property
    def concurrency(self) -> int:
        """The number of programs that run at once."""
        if self.workers is not None:
            return self.workers
        return max(4, 2 * len(os.sched_getaffinity(0)))
