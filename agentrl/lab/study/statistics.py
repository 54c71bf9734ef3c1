"""Intervals and tests over seeds. Runs of one seed begin with the same policy: variants are compared seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """A number with its 95 % interval and the number of seeds behind it."""

    value: float
    low: float
    high: float
    seeds: int


def over_seeds(values: Sequence[float], *, resamples: int) -> Estimated:
    """The mean with its percentile bootstrap interval; one seed has an interval without ends (nan).

    >>> over_seeds([0.5, 0.5, 0.5], resamples=100)
    Estimated(value=0.5, low=0.5, high=0.5, seeds=3)
    """
    return _bootstrapped(values, np.mean, resamples)


def interquartile_mean(values: Sequence[float], *, resamples: int) -> Estimated:
    """The mean of the middle half, as in Agarwal et al., "Deep RL at the edge of the statistical precipice" (2021).

    >>> interquartile_mean([0.0, 0.5, 0.7, 9.0], resamples=100).value
    0.6
    """
    from scipy.stats import trim_mean

    return _bootstrapped(values, lambda samples, axis: trim_mean(samples, 0.25, axis=axis), resamples)


def _bootstrapped(values: Sequence[float], statistic: Callable[..., np.ndarray], resamples: int) -> Estimated:
    from scipy.stats import bootstrap

    sample = np.asarray(values, dtype=float)
    value = float(statistic(sample, axis=0))
    low = high = value
    if len(sample) < 2:
        low = high = math.nan
    elif np.ptp(sample) > 0:
        found = bootstrap(
            (sample,), statistic, n_resamples=resamples, method="percentile", vectorized=True,
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = float(found.low), float(found.high)
    return Estimated(value=value, low=low, high=high, seeds=len(sample))


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """A variant minus the baseline, paired by seed: Student's interval, and the p-value of the sign-flip test, adjusted
    by Holm's method over all variants compared."""

    variant: str
    mean: float
    low: float
    high: float
    seeds: int
    p: float
    adjusted_p: float


def paired_differences(scores: Mapping[str, Mapping[int, float]], baseline: str) -> list[PairedDifference]:
    """Every other variant against ``baseline``, on the seeds that both have; ``scores`` by variant and seed.

    The sign-flip test is exact up to 20 seeds: with n seeds its p-value is at least 2 ** (1 - n). Variants with fewer
    than two common seeds are left out.
    """
    found: dict[str, np.ndarray] = {}
    own = scores[baseline]
    for variant, theirs in scores.items():
        common = sorted(own.keys() & theirs.keys())
        if variant != baseline and len(common) >= 2:
            found[variant] = np.array([theirs[seed] - own[seed] for seed in common])
    raw = {variant: sign_flip_p(values) for variant, values in found.items()}
    adjusted = holm(raw)
    return [_difference(variant, values, raw[variant], adjusted[variant]) for variant, values in found.items()]


def _difference(variant: str, values: np.ndarray, p: float, adjusted: float) -> PairedDifference:
    from scipy.stats import t

    mean, count = float(values.mean()), len(values)
    half = float(t.ppf(0.975, count - 1)) * float(values.std(ddof=1)) / math.sqrt(count)
    return PairedDifference(
        variant=variant, mean=mean, low=mean - half, high=mean + half, seeds=count, p=p, adjusted_p=adjusted
    )


def sign_flip_p(values: np.ndarray) -> float:
    """Two-sided p-value of "the sign of each difference is a coin's": the share of sign patterns with a mean at least
    as far from 0. It is exact for 20 values or fewer; for more it takes a million patterns at random.

    >>> sign_flip_p(np.array([0.1, 0.2, 0.3]))
    0.25
    """
    from scipy.stats import permutation_test

    if not values.any():
        return 1.0
    tested = permutation_test(
        (values,), lambda sample, axis: sample.mean(axis=axis), permutation_type="samples", n_resamples=2**20,
        vectorized=True, batch=2**14, rng=np.random.default_rng(0),
    )  # fmt: skip
    return min(1.0, float(tested.pvalue))


def holm(raw: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment (1979) of p-values for the number of comparisons.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for place, (name, p) in enumerate(sorted(raw.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(raw) - place)))
        adjusted[name] = highest
    return adjusted
