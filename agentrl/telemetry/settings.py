"""Settings of telemetry: what is shown and recorded of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl.telemetry.alerts import NAMES
from agentrl.telemetry.trackers.tracker import TRACKERS


class TelemetrySettings(BaseModel):
    """Console, plots, trajectories and token statistics; ``metrics.jsonl`` is always written."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    console: Literal["auto", "plain", "off"] = "auto"
    """auto: a live display on a terminal, plain lines elsewhere; plain: always plain lines; off: notes and tables
    only"""
    plain_every: int = Field(1, ge=1)
    """steps between two plain progress lines"""
    plots: bool = True
    """draw plots into plots/ at the end of a run"""
    trajectories_every: int = Field(1, ge=0)
    """steps between two recorded trajectory files; 0: record none"""
    tokens_every: int = Field(1, ge=0)
    """steps between two recorded files of token statistics (trainer log-probability, entropy, energy, return, baseline
    and advantage of each model token), which `agentrl explain` and `agentrl view` read; only steps whose trajectories
    are recorded have one. 0: record none"""
    trace: bool = False
    """write trace.json, which Perfetto (ui.perfetto.dev) opens: the steps of ranks and worker, every trajectory with
    its turns, programs and waiting, servers and sandboxes"""
    trackers: tuple[str, ...] = ()
    """experiment trackers that are told the settings, metrics, evaluations, plots and a sample of trajectories: wandb,
    trackio, tensorboard, mlflow, a registered name, or module:attribute (docs/telemetry.md)"""
    tracker_project: str = "agentrl"
    """the project (wandb, trackio) or experiment (mlflow) of the run"""
    tracker_tables_every: int = Field(10, ge=0)
    """steps between two tables of trajectories that trackers get; 0: none"""
    tracker_rows: int = Field(8, ge=1)
    """trajectories of a table"""
    tracker_deadline: float = Field(60.0, ge=0)
    """seconds that a run waits at its end until the trackers have sent everything"""
    stop_on: tuple[str, ...] = ()
    """alerts that end the run after the step at which they fire, with a checkpoint (docs/telemetry.md lists them)"""

    @field_validator("stop_on")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in NAMES:
                raise ValueError(f"there is no alert {name!r}; alerts: {', '.join(NAMES)}")
        return names

    @field_validator("trackers")
    @classmethod
    def _trackers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            TRACKERS.check(name)
        return names
