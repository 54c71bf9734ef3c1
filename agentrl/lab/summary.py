"""From moments to the numbers that are read: noise, scale, cosine, bias, with bootstrap intervals over problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.lab.measure import GradientMoments, ProblemMoments
from agentrl.lab.results import Energies

Floats = NDArray[np.float64]
_LEAST_FITTED = 8  # problems
OPTIMAL = ("otb", "tir_otb", "otb_isolated", "otb_total", "otb_cross")


@dataclass(frozen=True, kw_only=True)
class IntervalEstimate:
    """A number and its 95 % interval; infinite where a signal may be 0 or have the wrong sign."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One estimator at one group size. Sums over problems j of unbiased estimates: V_j the variance of a group's
    gradient, g_j its expectation, g*_j the true gradient."""

    estimator: str
    group_size: int
    variance: IntervalEstimate  # mean V_j: of one group's gradient
    scale: IntervalEstimate  # sum <g_j, g*_j> / sum ||g*_j||^2: 1 if unbiased
    noise: IntervalEstimate  # sum V_j / sum ||part of g_j along g*_j||^2 = sum V_j / (scale^2 sum ||g*_j||^2)
    directional: IntervalEstimate  # the part of it along g*_j: sum Var <g, g*_j> / sum <g_j, g*_j>^2
    cosine: IntervalEstimate  # sum <g_j, g*_j> / sqrt(sum ||g_j||^2 sum ||g*_j||^2)
    bias: IntervalEstimate  # sqrt(sum ||g_j - g*_j||^2 / sum ||g*_j||^2)
    to_best: IntervalEstimate  # noise over that of the least noisy estimator at this group size, paired by problem
    to_baseline: IntervalEstimate | None  # noise over that of the chosen baseline, paired by problem
    directional_to_baseline: IntervalEstimate | None
    head_variance: float | None  # mean over problems, of the head's gradient alone
    diagonal: float  # mean over problems of the diagonal proxy


def summarise(
    problems: Sequence[ProblemMoments], *, resamples: int, seed: int, baseline: str | None = None
) -> list[Line]:
    """A line for every estimator and group size, least noise first within a group size."""
    count = len(problems)
    draws = np.random.default_rng(seed).integers(0, count, size=(resamples, count))
    weights = np.stack([np.bincount(row, minlength=count) for row in draws]).astype(float)  # [R, J]
    weights = np.concatenate([np.ones((1, count)), weights])  # the first row is the sample itself
    return [
        line
        for size in problems[0]
        for line in _at_one_size(size, [moments[size] for moments in problems], weights, baseline)
    ]


def _at_one_size(
    size: int, problems: Sequence[Mapping[str, GradientMoments]], weights: Floats, baseline: str | None
) -> Iterator[Line]:
    columns = {label: _columns([moments[label] for moments in problems]) for label in problems[0]}
    noises = {label: _noise(found, weights) for label, found in columns.items()}
    directional = {label: _directional(found, weights) for label, found in columns.items()}
    ranked = sorted(noises, key=lambda label: (not np.isfinite(noises[label][0]), noises[label][0]))
    best = noises[ranked[0]]
    for label in ranked:
        found = columns[label]
        head = float(found["head_variance"].mean())
        yield Line(
            estimator=label,
            group_size=size,
            variance=_interval(weights @ found["variance"] / weights.sum(1)),
            scale=_interval(_scale(found, weights)),
            noise=_interval(noises[label]),
            directional=_interval(directional[label]),
            cosine=_interval(_cosine(found, weights)),
            bias=_interval(_bias(found, weights)),
            to_best=_interval(_relative(noises[label], best)),
            to_baseline=None if baseline is None else _interval(_relative(noises[label], noises[baseline])),
            directional_to_baseline=None
            if baseline is None
            else _interval(_relative(directional[label], directional[baseline])),
            head_variance=head if math.isfinite(head) else None,
            diagonal=float(found["diagonal"].mean()),
        )


def verdicts(lines: Sequence[Line]) -> list[str]:
    """For every group size: which estimator is least noisy, which are within its interval, and how the optimal token
    baselines compare, also where they do not win."""
    said = []
    for size in sorted({line.group_size for line in lines}):
        ranked = [line for line in lines if line.group_size == size]
        best, rest = ranked[0], ranked[1:]
        if not math.isfinite(best.noise.value):
            said.append(f"N={size}: no gradient can be told from noise here; take more problems or samples")
            continue
        close = [line.estimator for line in rest if line.to_best.low <= 1.0]
        text = f"N={size}: {best.estimator} has the least noise ({best.noise})"
        if close:
            text += f"; the difference lies within the interval for {', '.join(close)}"
        tokens = [line for line in ranked if line.estimator.split(":")[0] in OPTIMAL]
        if tokens:
            text += ". " + _verdict_on_optimal(tokens[0], best)
        said.append(text)
    return said


def _verdict_on_optimal(line: Line, best: Line) -> str:
    if line is best:
        return f"The optimal token baseline {line.estimator} wins here"
    how = "a difference within the interval" if line.to_best.low <= 1.0 else "it does not win here"
    return f"The best optimal token baseline is {line.estimator}, with {line.to_best} times that noise: {how}"


def energy_correlations(energies: Sequence[Energies]) -> dict[str, dict[str, float]]:
    """How well cheap energies follow the exact one: Pearson and Spearman over all trajectories, and Pearson within
    problems (each problem's mean taken out of both)."""
    exact = [np.array(item["exact"]) for item in energies]
    result = {}
    for name, proxy in proxy_energies(energies).items():
        x, y = np.concatenate(proxy), np.concatenate(exact)
        centred = [np.concatenate([part - part.mean() for part in parts]) for parts in (proxy, exact)]
        result[name] = {
            "pearson": _correlation(x, y),
            "spearman": _correlation(_ranks(x), _ranks(y)),
            "pearson_within_problems": _correlation(*centred),
        }
    return result


def proxy_energies(energies: Sequence[Energies]) -> dict[str, list[Floats]]:
    """The cheap energies of every problem's trajectories."""
    return {
        "logit_proxy": [np.array(item["logit_proxy"]) for item in energies],
        "head_exact": [np.array(item["head_exact"]) for item in energies],
        "length": [np.array(item["length"], dtype=float) for item in energies],
    }


def as_records(lines: Sequence[Line]) -> list[dict[str, object]]:
    """JSON-able; a value that is not a number (with a scale of 0) becomes null."""
    return [{key: _finite(value) for key, value in asdict(line).items()} for line in lines]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(moments: Sequence[GradientMoments]) -> dict[str, Floats]:
    """What was not measured is not a number; of ``along`` the error is taken that the same groups show elsewhere.

    x = reference_along - reference_squared has expectation 0, and is an error of drawing these groups. The least
    squares of ``along`` on reference_squared and x tell how much of it an estimator has: all for leave-one-out, whose
    scale is then 1 exactly, little for one with little noise. With fewer than eight problems these two numbers would
    leave nothing for the intervals, and nothing is taken.
    """
    records = [asdict(item) for item in moments]
    found = {name: np.array([record[name] for record in records], dtype=float) for name in records[0]}
    true, error = found["reference_squared"], found["reference_along"] - found["reference_squared"]
    if len(records) < _LEAST_FITTED:
        return found
    shares, *_ = np.linalg.lstsq(np.stack([true, error], axis=1), found["along"], rcond=None)
    return {**found, "along": found["along"] - shares[1] * error}


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)


def _relative(noise: Floats, best: Floats) -> Floats:
    """Noise over noise; not a number where both are infinite or both 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return noise / best


def _scale(found: dict[str, Floats], weights: Floats) -> Floats:
    return _ratio(weights @ found["along"], weights @ found["reference_squared"])


def _noise(found: dict[str, Floats], weights: Floats) -> Floats:
    along, true = weights @ found["along"], weights @ found["reference_squared"]
    pointed = (true > 0) & (along > 0)  # against the true gradient there is no signal
    return np.where(pointed, _ratio((weights @ found["variance"]) * true, along**2), np.inf)


def _directional(found: dict[str, Floats], weights: Floats) -> Floats:
    own, signal = weights @ found["along_variance"], weights @ found["along_squared"]
    return np.where(signal > 0, _ratio(np.maximum(own, 0.0), signal), np.where(np.isnan(own), np.nan, np.inf))


def _cosine(found: dict[str, Floats], weights: Floats) -> Floats:
    own, true = weights @ found["mean_squared"], weights @ found["reference_squared"]
    lengths = np.sqrt(np.maximum(own, 0.0) * np.maximum(true, 0.0))
    return _ratio(weights @ found["along"], lengths)


def _bias(found: dict[str, Floats], weights: Floats) -> Floats:
    squares = found["mean_squared"] - 2 * found["along"] + found["reference_squared"]
    return np.sqrt(np.maximum(0.0, _ratio(weights @ squares, weights @ found["reference_squared"])))


def _interval(values: Floats) -> IntervalEstimate:
    known = values[1:][~np.isnan(values[1:])]
    low = np.quantile(known, 0.025, method="lower") if known.size else math.nan
    high = np.quantile(known, 0.975, method="higher") if known.size else math.nan
    return IntervalEstimate(value=float(values[0]), low=float(low), high=float(high))


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    length = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / length if length > 0 else math.nan


def _ranks(values: Floats) -> Floats:
    """Ranks with ties at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2.0)[inverse]
