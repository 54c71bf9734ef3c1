"""Settings of the sandbox, with their defaults and bounds."""

from __future__ import annotations

import os
import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

_URL = re.compile(r"local://|docker://[^\s/]\S*|https?://[^\s/?#@]+/?")


LIMITS = (
    *("memory_mb", "max_processes", "scratch_mb", "output_limit", "flood_limit"),
    *("fetch_limit", "max_sessions", "session_idle_timeout"),
)
"""The settings that limit programs and sessions. A service has its own, which its clients can only compare."""


class SandboxSettings(BaseModel):
    """Where programs run and what each of them may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        "local://",
        description="where programs run: local:// starts a fork server on this machine, docker://IMAGE a container, "
        "http://HOST:PORT uses a service, whose own limits hold",
    )
    timeout: float = Field(10.0, gt=0, le=3600, description="seconds of wall clock for a program")
    memory_mb: int = Field(512, ge=16, description="megabytes a program may use beyond the bare interpreter")
    max_processes: int = Field(32, ge=1, le=4096, description="processes and threads of a program, itself included")
    scratch_mb: int = Field(64, ge=1, description="megabytes of a program's scratch directory")
    output_limit: int = Field(65_536, ge=256, description="bytes kept of each output stream, half head, half tail")
    flood_limit: int = Field(16_777_216, ge=4096, description="bytes of output after which a program is killed")
    fetch_limit: int = Field(16_777_216, ge=0, le=1 << 29, description="bytes of all files fetched after one program")
    max_sessions: int = Field(64, ge=0, le=1024, description="sessions open at once, forks included")
    session_idle_timeout: float = Field(600.0, gt=0, description="seconds without a program after which a session ends")
    workers: int | None = Field(
        None, ge=1, le=1024, description="programs that run at once; none: 2 a core, at least 4; of a service: 256"
    )
    token: str | None = Field(
        None, repr=False, exclude=True, description="a service's token, never written out; none: that of SANDBOX_TOKEN"
    )
    retry_deadline: float = Field(
        300.0, gt=0, description="seconds that a call waits for a busy or absent service before it counts as failed"
    )
    standby: bool = Field(False, description="keep a second server warm, to take over at once when the first one dies")
    first_user: int | None = Field(
        None,
        ge=1,
        le=4_000_000_000,
        description="started by root: number of the first of `workers` users (with standby: twice as many) that "
        "programs run as; none: drawn at random far above the users of a system",
    )
    allow_unisolated: bool = Field(False, description="run programs even where isolation is missing a property")

    @field_validator("url")
    @classmethod
    def _known_url(cls, url: str) -> str:
        if not _URL.fullmatch(url):
            raise ValueError(f"unknown sandbox {url!r}; valid: local://, docker://IMAGE, http://HOST:PORT")
        return url

    @property
    def scheme(self) -> str:
        """``local``, ``docker``, ``http`` or ``https``."""
        return self.url.partition("://")[0]

    @property
    def slots(self) -> int:
        """How many users programs have: one for each worker and for each session."""
        return self.concurrency + self.max_sessions

    @property
    def concurrency(self) -> int:
        """How many programs run at once."""
        if self.workers is not None:
            return self.workers
        return max(4, 2 * len(os.sched_getaffinity(0)))
