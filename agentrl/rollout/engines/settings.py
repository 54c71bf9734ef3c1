"""Settings that every engine of servers has. A plug-in adds its own by subclassing."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class NoOptions(BaseModel):
    """The options of an engine that has none: every key in ``rollout.options`` is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(BaseModel):
    """Addresses, number and deadlines of an engine's servers.

    >>> ServerSettings(replicas=2).stall_deadline
    300.0
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: ClassVar[str] = "rollout.options"
    """The key of these settings, for error messages."""

    addresses: list[str] = Field([], description="addresses of external servers, as http://HOST:PORT")
    replicas: int = Field(1, ge=1, description="number of servers to start")
    probe_bound: float | None = Field(
        None,
        gt=0,
        description="largest mean |log-prob difference| on the probe after a transfer; null: measured at the start",
    )
    start_deadline: float = Field(900.0, gt=0, description="seconds a server may take to start")
    stall_deadline: float = Field(
        300.0,
        gt=0,
        description="seconds a server with requests may compute no token before its requests go to another server; "
        "the duration of a request is not limited. Also the seconds in which nccl and ipc must send another parameter",
    )
    outage_deadline: float = Field(
        600.0, gt=0, description="seconds without any working server after which the run ends with an error"
    )
    request_retries: int = Field(8, ge=0, description="how often a request is sent again after a server failed it")
    restarts: int = Field(3, ge=0, description="how often each server that the run has started is restarted")
