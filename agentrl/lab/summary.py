"""Noise, scale, cosine and bias of estimators from their moments, with bootstrap intervals over problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.algorithms import ESTIMATORS
from agentrl.lab.measure import GradientMoments, ProblemMoments
from agentrl.lab.settings import CROSS

Floats = NDArray[np.float64]
_MIN_FITTED_PROBLEMS = 8  # minimum number of problems for the fit in `_corrected_moment_columns`


@dataclass(frozen=True, kw_only=True)
class IntervalEstimate:
    """A number and its 95 % interval. A bound is infinite if the signal may be 0 or have the wrong sign."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, kw_only=True)
class EstimatorResult:
    """Results of one estimator at one group size.

    Ratios of sums over problems j of unbiased estimates: V_j is the variance of a group's gradient, g_j its expectation
    and g*_j the true gradient.
    """

    estimator: str
    group_size: int
    variance: IntervalEstimate  # mean V_j, the variance of one group's gradient
    scale: IntervalEstimate  # sum <g_j, g*_j> / sum ||g*_j||^2: 1 if unbiased
    noise: IntervalEstimate  # sum V_j / sum ||part of g_j along g*_j||^2 = sum V_j / (scale^2 sum ||g*_j||^2)
    directional: IntervalEstimate  # noise along g*_j only: sum Var <g, g*_j> / sum <g_j, g*_j>^2
    cosine: IntervalEstimate  # sum <g_j, g*_j> / sqrt(sum ||g_j||^2 sum ||g*_j||^2)
    bias: IntervalEstimate  # sqrt(sum ||g_j - g*_j||^2 / sum ||g*_j||^2)
    to_best: IntervalEstimate  # noise divided by the least noise at this group size, paired by problem
    to_baseline: IntervalEstimate | None  # noise divided by the baseline estimator's noise, paired by problem
    directional_to_baseline: IntervalEstimate | None
    head_variance: float | None  # variance of the head's gradient alone, mean over problems
    diagonal: float  # diagonal proxy, mean over problems


def summarize_estimators(
    problems: Sequence[ProblemMoments], *, resamples: int, seed: int, baseline: str | None = None
) -> list[EstimatorResult]:
    """Summarize each estimator at each group size, sorted by group size, then by noise."""
    count = len(problems)
    draws = np.random.default_rng(seed).integers(0, count, size=(resamples, count))
    weights = np.stack([np.bincount(row, minlength=count) for row in draws]).astype(float)  # [R, J]
    weights = np.concatenate([np.ones((1, count)), weights])  # the first row is the sample itself
    return [
        line
        for size in problems[0]
        for line in _summarize_group_size(size, [moments[size] for moments in problems], weights, baseline)
    ]


def _summarize_group_size(
    size: int, problems: Sequence[Mapping[str, GradientMoments]], weights: Floats, baseline: str | None
) -> Iterator[EstimatorResult]:
    columns = {label: _corrected_moment_columns([moments[label] for moments in problems]) for label in problems[0]}
    noises = {label: _noise(fields, weights) for label, fields in columns.items()}
    directional = {label: _directional_noise(fields, weights) for label, fields in columns.items()}
    ranked = sorted(noises, key=lambda label: (not np.isfinite(noises[label][0]), noises[label][0]))
    best = noises[ranked[0]]
    for label in ranked:
        fields = columns[label]
        head = float(fields["head_variance"].mean())
        yield EstimatorResult(
            estimator=label,
            group_size=size,
            variance=_interval(weights @ fields["variance"] / weights.sum(1)),
            scale=_interval(_scale(fields, weights)),
            noise=_interval(noises[label]),
            directional=_interval(directional[label]),
            cosine=_interval(_cosine(fields, weights)),
            bias=_interval(_relative_bias(fields, weights)),
            to_best=_interval(_noise_ratio(noises[label], best)),
            to_baseline=None if baseline is None else _interval(_noise_ratio(noises[label], noises[baseline])),
            directional_to_baseline=None
            if baseline is None
            else _interval(_noise_ratio(directional[label], directional[baseline])),
            head_variance=head if math.isfinite(head) else None,
            diagonal=float(fields["diagonal"].mean()),
        )


def describe_findings(lines: Sequence[EstimatorResult]) -> list[str]:
    """Describe the results of each group size in a sentence.

    Names the least noisy estimator, the estimators within its interval, and the best token baseline.
    """
    messages = []
    for size in sorted({line.group_size for line in lines}):
        ranked = [line for line in lines if line.group_size == size]
        best, rest = ranked[0], ranked[1:]
        if not math.isfinite(best.noise.value):
            messages.append(f"N={size}: no gradient can be distinguished from noise; use more problems or samples")
            continue
        close = [line.estimator for line in rest if line.to_best.low <= 1.0]
        text = f"N={size}: {best.estimator} has the least noise ({best.noise})"
        if close:
            text += f"; the differences from {', '.join(close)} are within the interval"
        tokens = [line for line in ranked if is_token_baseline(line.estimator)]
        if tokens:
            text += ". " + _compare_token_baseline(tokens[0], best)
        messages.append(text)
    return messages


def is_token_baseline(label: str) -> bool:
    """Return True if an estimator computes a baseline for every token from the group. ``label`` may include options."""
    name = label.split(":")[0]
    if name == CROSS:
        return True
    return name in ESTIMATORS.names() and ESTIMATORS[name].group_based and ESTIMATORS[name].per_token


def _compare_token_baseline(line: EstimatorResult, best: EstimatorResult) -> str:
    if line is best:
        return f"The token baseline {line.estimator} is the best"
    how = "within" if line.to_best.low <= 1.0 else "outside"
    return (
        f"The best token baseline is {line.estimator}, with {line.to_best} times the least noise; the difference is "
        f"{how} the interval"
    )


def as_records(lines: Sequence[EstimatorResult]) -> list[dict[str, object]]:
    """Convert lines to JSON values. Non-finite numbers become null."""
    return [{key: _without_infinities(value) for key, value in asdict(line).items()} for line in lines]


def _without_infinities(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _corrected_moment_columns(moments: Sequence[GradientMoments]) -> dict[str, Floats]:
    """Return moments as columns over problems, with ``along`` corrected for the drawn groups. Missing values are nan.

    x = reference_along - reference_squared has expectation 0: it is the error due to the drawn groups. A least-squares
    fit of ``along`` on reference_squared and x estimates the part of this error that an estimator shares, and this part
    is subtracted. Leave-one-out shares the whole error, so its scale becomes exactly 1. An estimator with little noise
    shares little. With fewer than eight problems, the two fitted coefficients would leave too few degrees of freedom
    for the intervals, and ``along`` is not corrected.
    """
    records = [asdict(item) for item in moments]
    columns = {name: np.array([record[name] for record in records], dtype=float) for name in records[0]}
    true, error = columns["reference_squared"], columns["reference_along"] - columns["reference_squared"]
    if len(records) < _MIN_FITTED_PROBLEMS:
        return columns
    shares, *_ = np.linalg.lstsq(np.stack([true, error], axis=1), columns["along"], rcond=None)
    return {**columns, "along": columns["along"] - shares[1] * error}


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)


def _noise_ratio(noise: Floats, best: Floats) -> Floats:
    """Compute the ratio of two noise values. The ratio is nan if both values are infinite or both are 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return noise / best


def _scale(columns: dict[str, Floats], weights: Floats) -> Floats:
    return _ratio(weights @ columns["along"], weights @ columns["reference_squared"])


def _noise(columns: dict[str, Floats], weights: Floats) -> Floats:
    along, true = weights @ columns["along"], weights @ columns["reference_squared"]
    pointed = (true > 0) & (along > 0)  # a gradient that points away from the true gradient carries no signal
    return np.where(pointed, _ratio((weights @ columns["variance"]) * true, along**2), np.inf)


def _directional_noise(columns: dict[str, Floats], weights: Floats) -> Floats:
    variance, signal = weights @ columns["along_variance"], weights @ columns["along_squared"]
    return np.where(signal > 0, _ratio(np.maximum(variance, 0.0), signal), np.where(np.isnan(variance), np.nan, np.inf))


def _cosine(columns: dict[str, Floats], weights: Floats) -> Floats:
    squared, true = weights @ columns["mean_squared"], weights @ columns["reference_squared"]
    lengths = np.sqrt(np.maximum(squared, 0.0) * np.maximum(true, 0.0))
    return _ratio(weights @ columns["along"], lengths)


def _relative_bias(columns: dict[str, Floats], weights: Floats) -> Floats:
    squares = columns["mean_squared"] - 2 * columns["along"] + columns["reference_squared"]
    return np.sqrt(np.maximum(0.0, _ratio(weights @ squares, weights @ columns["reference_squared"])))


def _interval(values: Floats) -> IntervalEstimate:
    # The first value is from the sample itself; all others are from bootstrap resamples. Quantiles are not
    # interpolated, because values may be infinite.
    known = values[1:][~np.isnan(values[1:])]
    low = np.quantile(known, 0.025, method="lower") if known.size else math.nan
    high = np.quantile(known, 0.975, method="higher") if known.size else math.nan
    return IntervalEstimate(value=float(values[0]), low=float(low), high=float(high))
