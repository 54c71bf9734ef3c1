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
    """One measurement of `agentrl variance`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problems: int = Field(
        16, ge=2, description="number of problems, taken from data.train; problems with equal rewards are left out"
    )
    problem_file: str | None = Field(None, description="digest of the problems of a given file")
    samples: int = Field(64, ge=4, description="trajectories of each problem, drawn once; groups are drawn from them")
    group_sizes: tuple[int, ...] = Field((4, 8, 16), description="N; each at most half of the samples")
    groups: int = Field(16, ge=2, description="most groups of a size in one division of a problem's samples")
    estimators: tuple[str, ...] = Field(
        (), description="names, with options as in tir_otb:leave_one_out=true; by default all"
    )
    baseline: str | None = Field(None, description="the estimator whose noise the others' is divided by")
    partitions: int = Field(1, ge=1, description="random divisions of the samples into groups, at every group size")
    bootstrap: int = Field(2000, ge=100, description="resamples of the problems behind each 95 % interval")
    drop_zero_variance: bool = Field(
        True,
        description="as in training, a group whose rewards are all equal gives no gradient, unless its baseline comes "
        "from other groups, too",
    )
    head: bool = Field(False, description="measure the variance of the head's gradient alone, too")
    batch: int = Field(
        16, ge=1, description="problems played together: a step to estimators that look at the whole step"
    )
    micro_batch_tokens: int = Field(8192, ge=64, description="tokens of one forward that asks for statistics")
    score_memory: int = Field(
        2 << 30, ge=0, description="bytes that one problem's gradients may take, one of them a trajectory"
    )


@dataclass(frozen=True, kw_only=True)
class LabRequest:
    """The arguments of the command line; None where one is omitted."""

    problems: str | None = None
    group_sizes: str | None = None
    estimators: str | None = None
    samples: int | None = None
    baseline: str | None = None
    head: bool = False


def lab_settings(request: LabRequest) -> LabSettings:
    """Settings from the command line's arguments; an omitted one has its default. Raises SettingsError."""
    given: dict[str, object] = {"baseline": request.baseline, "head": request.head}
    if request.group_sizes is not None:
        given["group_sizes"] = sizes = [part.strip() for part in request.group_sizes.split(",")]
        wrong = [part for part in sizes if not part.isdigit()]
        if wrong:
            raise SettingsError(f"--group-sizes: {wrong[0]!r} is not a whole number; write them as 4,8,16")
    if request.estimators is not None:
        given["estimators"] = [part.strip() for part in request.estimators.split(",") if part.strip()]
    if request.samples is not None:
        given["samples"] = request.samples
        if request.samples < 4:
            raise SettingsError(f"--samples {request.samples}: at least 4, two groups of two")
    return LabSettings.model_validate(given)


def check_lab(lab: LabSettings) -> tuple[Choice, ...]:
    """The chosen estimators. Raises SettingsError before anything is sampled."""
    if not lab.group_sizes or len(set(lab.group_sizes)) < len(lab.group_sizes):
        raise SettingsError(
            f"--group-sizes {','.join(map(str, lab.group_sizes))}: give different sizes, such as 4,8,16"
        )
    wrong = [size for size in lab.group_sizes if not 2 <= size <= lab.samples // 2]
    if wrong:
        raise SettingsError(
            f"--group-sizes {','.join(map(str, wrong))}: a group has 2 to {lab.samples // 2} trajectories, half of the "
            f"{lab.samples} samples of a problem, so that a variance can be taken; raise --samples or lower the size"
        )
    choices = read_choices(lab.estimators)
    labels = [choice.label for choice in choices]
    if lab.baseline is not None and lab.baseline not in labels:
        raise SettingsError(f"--baseline {lab.baseline}: it is not measured; valid: {', '.join(labels)}")
    return choices


class CorrectionSection(Protocol):
    """How importance weights are formed, as options of `rollout_correction`."""

    def model_dump(self) -> dict[str, object]: ...


class LabSections(EnvironmentSections, EngineSections, Protocol):
    """The sections of a run's settings that a measurement needs."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def reward(self) -> RewardSettings: ...
    @property
    def correction(self) -> CorrectionSection: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
