"""Settings of telemetry: output and recorded files of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl.telemetry.alerts import ALERT_NAMES
from agentrl.telemetry.trackers import TRACKERS


class TelemetrySettings(BaseModel):
    """Settings of console, plots, trajectories and token statistics. ``metrics.jsonl`` is always written."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    console: Literal["auto", "plain", "off"] = "auto"
    """auto: a live display on a terminal, plain lines elsewhere; plain: always plain lines; off: notes and tables
    only"""
    plain_every: int = Field(1, ge=1)
    """number of steps between plain progress lines"""
    plots: bool = True
    """draw plots into plots/ at the end of a run"""
    trajectories_every: int = Field(1, ge=0)
    """number of steps between recorded trajectory files; 0: record none"""
    tokens_every: int = Field(1, ge=0)
    """number of steps between recorded files of token statistics (trainer log-probability, entropy, energy, return,
    baseline and advantage of each model token), which `agentrl explain` and `agentrl view` read; only steps whose
    trajectories are recorded have such a file. 0: record none"""
    trace: bool = False
    """write trace.json for Perfetto (ui.perfetto.dev), with the steps of ranks and worker, the servers, the sandboxes,
    and every trajectory with its turns, programs and waiting times"""
    trackers: tuple[str, ...] = ()
    """experiment trackers to which settings, metrics, evaluations, plots and a sample of trajectories are logged:
    wandb, trackio, tensorboard, mlflow, a registered name, or module:attribute (docs/reference/telemetry.md)"""
    tracker_project: str = "agentrl"
    """project (wandb, trackio) or experiment (mlflow) of the run"""
    tracker_tables_every: int = Field(10, ge=0)
    """number of steps between tables of trajectories for trackers; 0: none"""
    tracker_rows: int = Field(8, ge=1)
    """number of trajectories per table"""
    tracker_deadline: float = Field(60.0, ge=0)
    """seconds to wait at the end of a run for trackers to send everything"""
    stop_on: tuple[str, ...] = ()
    """alerts that end the run with a checkpoint after the step at which they fire
    (docs/reference/telemetry.md lists them)"""

    @field_validator("stop_on")
    @classmethod
    def _check_alert_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in ALERT_NAMES:
                raise ValueError(f"unknown alert {name!r}; valid: {', '.join(ALERT_NAMES)}")
        return names

    @field_validator("trackers")
    @classmethod
    def _check_tracker_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            TRACKERS.check(name)
        return names
