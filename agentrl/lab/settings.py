"""Settings of the variance laboratory: the sample and the compared estimators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.algorithms import ESTIMATORS, AlgorithmError, UnknownNameError
from agentrl.errors import SettingsError
from agentrl.problems.settings import DataSettings
from agentrl.rollout.settings import EngineRelatedSettings, EnvironmentRelatedSettings, RewardSettings
from agentrl.telemetry.settings import TelemetrySettings

CROSS = "otb_cross"
"""An estimator that exists only here: `otb_isolated` with the cross energies of tokens (docs/how-to/variance.md)."""
_UNAVAILABLE = {"values": "it needs a critic that was trained for this policy"}
"""Inputs that rollouts alone do not provide, with the reason for the error message."""
_NO_GRADIENT = "none"


@dataclass(frozen=True, kw_only=True)
class EstimatorChoice:
    """A registered estimator with its options.

    ``label`` is the text on the command line. ``cross`` replaces the energies of tokens with cross energies.
    """

    label: str
    name: str
    options: dict[str, Any]
    cross: bool = False


def parse_estimator_choices(texts: Sequence[str]) -> tuple[EstimatorChoice, ...]:
    """Parse estimators written as ``name`` or ``name:option=value:option=value``.

    Empty ``texts`` selects all estimators that can be measured. Raises SettingsError with the nearest known name or
    option.

    >>> parse_estimator_choices(["tir_otb:leave_one_out=true"])[0].options
    {'leave_one_out': True}
    """
    chosen = list(texts) or measurable_estimators()
    repeated = sorted({text for text in chosen if chosen.count(text) > 1})
    if repeated:
        raise SettingsError(f"--estimators lists {', '.join(repeated)} twice: list each estimator once")
    return tuple(_parse_choice(text) for text in chosen)


def measurable_estimators() -> list[str]:
    """Return `otb_cross` and, except for `none`, the registered estimators whose inputs rollouts provide."""
    names = [name for name in ESTIMATORS.names() if not ESTIMATORS[name].requires & _UNAVAILABLE.keys()]
    return [CROSS, *(name for name in names if name != _NO_GRADIENT)]


def _parse_choice(text: str) -> EstimatorChoice:
    name, *parts = text.split(":")
    options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise SettingsError(f"--estimators: options of {text} must be written as option=value, such as tail=carry")
        options[option] = _parse_option_value(value)
    cross = name == CROSS
    if cross:
        name = "otb_isolated"
        if "energy" in options:
            raise SettingsError(f"--estimators: {text}: {CROSS} has no option energy, because its energy is fixed")
    try:
        entry = ESTIMATORS[name]
        entry.make_options(f"estimator {name!r}", options)
    except (AlgorithmError, UnknownNameError, TypeError) as error:
        raise SettingsError(f"--estimators: {text}: {error}") from error
    if name == _NO_GRADIENT:
        raise SettingsError(f"--estimators: {name} cannot be measured: all its advantages are 0")
    for missing in sorted(entry.requires & _UNAVAILABLE.keys()):
        raise SettingsError(f"--estimators: {name} cannot be measured: {_UNAVAILABLE[missing]}")
    return EstimatorChoice(label=text, name=name, options=options, cross=cross)


def _parse_option_value(text: str) -> Any:
    known = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """Settings of one `agentrl variance` measurement."""

    problems: int = 16  # number of problems from data.train to measure; problems with equal rewards are skipped
    problem_file: str | None = None  # digest of the problems if they are read from a file
    samples: int = 64  # number of trajectories sampled for each problem; groups are drawn from them
    group_sizes: tuple[int, ...] = (4, 8, 16)
    groups: int = 16  # maximum number of groups of a problem
    choices: tuple[EstimatorChoice, ...] = ()
    baseline: str | None = None  # label of the estimator whose noise is the reference; None: rloo, if it is measured
    head: bool = False  # also measure the variance of the head's gradient alone


def parse_lab_settings(
    *,
    samples: int | None = None,
    group_sizes: str | None = None,
    estimators: str | None = None,
    baseline: str | None = None,
    head: bool = False,
) -> LabSettings:
    """Parse and check command-line arguments. Raises SettingsError for an invalid argument."""
    samples = LabSettings.samples if samples is None else samples
    if samples < 4:
        raise SettingsError(f"--samples must be at least 4, for two groups of two; got {samples}")
    sizes = LabSettings.group_sizes
    if group_sizes is not None:
        parts = [part.strip() for part in group_sizes.split(",")]
        invalid = [part for part in parts if not part.isdigit()]
        if invalid:
            raise SettingsError(f"--group-sizes must be whole numbers, such as 4,8,16; got {invalid[0]!r}")
        sizes = tuple(map(int, parts))
    if len(set(sizes)) < len(sizes):
        raise SettingsError(f"--group-sizes must be different sizes, such as 4,8,16; got {group_sizes}")
    invalid = [str(size) for size in sizes if not 2 <= size <= samples // 2]
    if invalid:
        raise SettingsError(
            f"--group-sizes {','.join(invalid)}: a group must have 2 to {samples // 2} trajectories, because a "
            f"variance needs two groups from the {samples} samples of a problem; raise --samples or lower the size"
        )
    choices = parse_estimator_choices([part.strip() for part in (estimators or "").split(",") if part.strip()])
    labels = [choice.label for choice in choices]
    if baseline is not None and baseline not in labels:
        raise SettingsError(f"--baseline {baseline} is not a measured estimator; valid: {', '.join(labels)}")
    return LabSettings(samples=samples, group_sizes=sizes, choices=choices, baseline=baseline, head=head)


class CorrectionSection(Protocol):
    """Settings of importance weights, as options of `rollout_correction`."""

    @property
    def options(self) -> dict[str, object]: ...


class LabSections(EnvironmentRelatedSettings, EngineRelatedSettings, Protocol):
    """Sections of a run's settings that a measurement needs."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def reward(self) -> RewardSettings: ...
    @property
    def correction(self) -> CorrectionSection: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
