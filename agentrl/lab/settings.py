"""Settings of the variance laboratory: the sample, the estimators compared, and the precision of the intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from agentrl.errors import SettingsError
from agentrl.lab.choices import Choice, read_choices
from agentrl.problems.settings import DataSettings
from agentrl.rollout.settings import EngineSections, EnvironmentSections, RewardSettings
from agentrl.telemetry.settings import TelemetrySettings


class LabSettings(BaseModel):
    """Settings of one `agentrl variance` measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problems: int = Field(
        16, ge=2, description="number of problems from data.train to measure; problems with equal rewards are skipped"
    )
    problem_file: str | None = Field(None, description="digest of the problems if they are read from a file")
    samples: int = Field(64, ge=4, description="trajectories sampled for each problem; groups are drawn from them")
    group_sizes: tuple[int, ...] = Field((4, 8, 16), description="group sizes N, each at most half of the samples")
    groups: int = Field(16, ge=2, description="maximum number of groups in one division of a problem's samples")
    estimators: tuple[str, ...] = Field(
        (), description="estimator names, with options as in tir_otb:leave_one_out=true; default: all"
    )
    baseline: str | None = Field(None, description="estimator to whose noise the noise of the others is compared")
    partitions: int = Field(1, ge=1, description="random divisions of the samples into groups for each group size")
    bootstrap: int = Field(2000, ge=100, description="bootstrap resamples of problems for the 95 % intervals")
    drop_zero_variance: bool = Field(
        True,
        description="as in training, drop groups with equal rewards, unless the estimator also uses rewards of other "
        "groups in its baseline",
    )
    head: bool = Field(False, description="also measure the variance of the head's gradient alone")
    batch: int = Field(
        16, ge=1, description="problems sampled together; they form the step of estimators that span the step"
    )
    micro_batch_tokens: int = Field(8192, ge=64, description="tokens of one forward pass for token statistics")
    score_memory: int = Field(
        2 << 30, ge=0, description="maximum bytes for the gradients of one problem, one gradient per trajectory"
    )


@dataclass(frozen=True, kw_only=True)
class LabRequest:
    """Arguments of the command line; None if omitted."""

    problems: str | None = None
    group_sizes: str | None = None
    estimators: str | None = None
    samples: int | None = None
    baseline: str | None = None
    head: bool = False


def lab_settings(request: LabRequest) -> LabSettings:
    """Settings from command line arguments, with defaults for omitted ones. Raises SettingsError."""
    values: dict[str, object] = {"baseline": request.baseline, "head": request.head}
    if request.group_sizes is not None:
        values["group_sizes"] = sizes = [part.strip() for part in request.group_sizes.split(",")]
        wrong = [part for part in sizes if not part.isdigit()]
        if wrong:
            raise SettingsError(f"--group-sizes: {wrong[0]!r} is not a whole number; write sizes as in 4,8,16")
    if request.estimators is not None:
        values["estimators"] = [part.strip() for part in request.estimators.split(",") if part.strip()]
    if request.samples is not None:
        values["samples"] = request.samples
        if request.samples < 4:
            raise SettingsError(f"--samples {request.samples}: at least 4 are needed, for two groups of two")
    return LabSettings.model_validate(values)


def check_lab(lab: LabSettings) -> tuple[Choice, ...]:
    """Parse the estimators and check group sizes and baseline. Raises SettingsError."""
    if not lab.group_sizes or len(set(lab.group_sizes)) < len(lab.group_sizes):
        raise SettingsError(
            f"--group-sizes {','.join(map(str, lab.group_sizes))}: list different sizes, such as 4,8,16"
        )
    wrong = [size for size in lab.group_sizes if not 2 <= size <= lab.samples // 2]
    if wrong:
        raise SettingsError(
            f"--group-sizes {','.join(map(str, wrong))}: a group must have 2 to {lab.samples // 2} trajectories, "
            f"because a variance needs two groups from the {lab.samples} samples of a problem; raise --samples or "
            "lower the size"
        )
    choices = read_choices(lab.estimators)
    labels = [choice.label for choice in choices]
    if lab.baseline is not None and lab.baseline not in labels:
        raise SettingsError(f"--baseline {lab.baseline}: not among the measured estimators: {', '.join(labels)}")
    return choices


class CorrectionSection(Protocol):
    """Settings of importance weights, as options of `rollout_correction`."""

    def model_dump(self) -> dict[str, object]: ...


class LabSections(EnvironmentSections, EngineSections, Protocol):
    """Sections of a run's settings that a measurement needs."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def reward(self) -> RewardSettings: ...
    @property
    def correction(self) -> CorrectionSection: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
