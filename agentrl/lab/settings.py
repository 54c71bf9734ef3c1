"""Settings of the variance laboratory: the sample, the estimators compared, and the precision of the intervals."""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from agentrl.problems.settings import DataSettings
from agentrl.rollout.settings import EngineSections, EnvironmentSections, RewardSettings
from agentrl.telemetry.settings import TelemetrySettings


class LabSettings(BaseModel):
    """One measurement of `agentrl variance`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problems: int = Field(
        16, ge=2, description="number of problems, taken from data.train; problems with equal rewards are left out"
    )
    samples: int = Field(64, ge=4, description="trajectories of each problem, drawn once; groups are drawn from them")
    group_sizes: tuple[int, ...] = Field((4, 8, 16), description="N; each at most half of the samples")
    estimators: tuple[str, ...] = Field(
        (), description="names, with options as in tir_otb:leave_one_out=true; by default all"
    )
    partitions: int = Field(2, ge=1, description="random divisions of the samples into groups, at every group size")
    bootstrap: int = Field(2000, ge=100, description="resamples of the problems behind each 95 % interval")
    drop_zero_variance: bool = Field(
        True, description="a group whose rewards are all equal gives no gradient, as in training"
    )
    micro_batch_tokens: int = Field(8192, ge=64, description="tokens of one forward; a group is never split")
    score_memory: int = Field(
        2 << 30,
        ge=0,
        description="bytes for keeping one gradient per trajectory, which saves backward passes; 0 keeps none",
    )


class LabSections(EnvironmentSections, EngineSections, Protocol):
    """The sections of a run's settings that a measurement needs."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def reward(self) -> RewardSettings: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
