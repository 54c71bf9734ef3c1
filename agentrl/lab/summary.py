"""From moments to the numbers that are read: noise, scale, cosine, bias, with bootstrap intervals over problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.lab.measure import GradientMoments, Measurement
from agentrl.lab.sample import ProblemSample

Floats = NDArray[np.float64]
OPTIMAL = ("otb", "tir_otb", "otb_isolated", "otb_total", "otb_cross")


@dataclass(frozen=True, kw_only=True)
class IntervalEstimate:
    """A number and its 95 % interval."""

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
    cosine: IntervalEstimate  # sum <g_j, g*_j> / sqrt(sum ||g_j||^2 sum ||g*_j||^2)
    bias: IntervalEstimate  # sqrt(sum ||g_j - g*_j||^2 / sum ||g*_j||^2)
    to_best: IntervalEstimate  # noise over that of the least noisy estimator at this group size, paired by problem
    step_variance: float  # docs/formulas.md 7 with J groups, one a problem: (P - S) / (J - 1), mean over all such steps
    head_variance: float  # mean over problems, of the head's gradient alone
    diagonal: float  # mean over problems of the diagonal proxy


def summarise(measured: Measurement, *, resamples: int, seed: int) -> list[Line]:
    """A line for every estimator and group size, least noise first within a group size."""
    problems = len(measured.problems)
    draws = np.random.default_rng(seed).integers(0, problems, size=(resamples, problems))
    weights = np.stack([np.bincount(row, minlength=problems) for row in draws]).astype(float)  # [R, J]
    weights = np.concatenate([np.ones((1, problems)), weights])  # the first row is the sample itself
    lines = []
    for size, by_label in measured.moments.items():
        noises = {label: _noise(_columns(found), weights) for label, found in by_label.items()}
        best = min(noises, key=lambda label: noises[label][0])
        for label in sorted(noises, key=lambda label: noises[label][0]):
            found = _columns(by_label[label])
            lines.append(
                Line(
                    estimator=label,
                    group_size=size,
                    variance=_interval(weights @ found["variance"] / weights.sum(1)),
                    scale=_interval(_scale(found, weights)),
                    noise=_interval(noises[label]),
                    cosine=_interval(_cosine(found, weights)),
                    bias=_interval(_bias(found, weights)),
                    to_best=_interval(_relative(noises[label], noises[best])),
                    step_variance=_step_variance(found, measured.signal[size][label]),
                    head_variance=float(found["head_variance"].mean()),
                    diagonal=float(found["diagonal"].mean()),
                )
            )
    return lines


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


def energy_correlations(samples: Sequence[ProblemSample]) -> dict[str, dict[str, float]]:
    """How well cheap energies follow the exact one: Pearson and Spearman over all trajectories, and Pearson within
    problems (each problem's mean taken out of both)."""
    exact = [sample.trajectory_energy.double().numpy() for sample in samples]
    result = {}
    for name, proxy in proxy_energies(samples).items():
        x, y = np.concatenate(proxy), np.concatenate(exact)
        centred = [np.concatenate([part - part.mean() for part in parts]) for parts in (proxy, exact)]
        result[name] = {
            "pearson": _correlation(x, y),
            "spearman": _correlation(_ranks(x), _ranks(y)),
            "pearson_within_problems": _correlation(*centred),
        }
    return result


def proxy_energies(samples: Sequence[ProblemSample]) -> dict[str, list[Floats]]:
    """The cheap energies of every problem's trajectories."""
    return {
        "logit_proxy": [sample.token_energy.double().sum(-1).numpy() for sample in samples],
        "head_exact": [
            (sample.token_energy * sample.hidden_norm_squared).double().sum(-1).numpy() for sample in samples
        ],
        "length": [sample.lengths.double().numpy() for sample in samples],
    }


def as_records(lines: Sequence[Line]) -> list[dict[str, object]]:
    """JSON-able; a value that is not a number (with a scale of 0) becomes null."""
    return [{key: _finite(value) for key, value in asdict(line).items()} for line in lines]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(moments: Sequence[GradientMoments]) -> dict[str, Floats]:
    records = [asdict(item) for item in moments]
    return {name: np.array([record[name] for record in records]) for name in records[0]}


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)


def _relative(noise: Floats, best: Floats) -> Floats:
    """Noise over noise; not a number where both are infinite."""
    with np.errstate(invalid="ignore"):
        return noise / best


def _scale(found: dict[str, Floats], weights: Floats) -> Floats:
    return _ratio(weights @ found["along"], weights @ found["reference_squared"])


def _noise(found: dict[str, Floats], weights: Floats) -> Floats:
    along, true = weights @ found["along"], weights @ found["reference_squared"]
    return np.where(true > 0, _ratio((weights @ found["variance"]) * true, along**2), np.inf)


def _cosine(found: dict[str, Floats], weights: Floats) -> Floats:
    own, true = weights @ found["mean_squared"], weights @ found["reference_squared"]
    lengths = np.sqrt(np.maximum(own, 0.0) * np.maximum(true, 0.0))
    return _ratio(weights @ found["along"], lengths)


def _bias(found: dict[str, Floats], weights: Floats) -> Floats:
    squares = found["mean_squared"] - 2 * found["along"] + found["reference_squared"]
    return np.sqrt(np.maximum(0.0, _ratio(weights @ squares, weights @ found["reference_squared"])))


def _step_variance(found: dict[str, Floats], signal: float) -> float:
    """(P - S)/(J - 1) averaged over every way to take one group a problem: E||mean_j g_j||^2 is that of the means plus
    the groups' own spread, (1/J^2) sum_j (P_j - ||g_j||^2)."""
    problems = len(found["power"])
    expected = signal + float((found["power"] - found["drawn_squared"]).sum()) / problems**2
    return (float(found["power"].mean()) - expected) / (problems - 1)


def _interval(values: Floats) -> IntervalEstimate:
    finite = values[1:][np.isfinite(values[1:])]
    low, high = np.quantile(finite, [0.025, 0.975]) if finite.size else (math.nan, math.nan)
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
