"""Curves of a study's runs, and intervals and tests over seeds.

Variants are paired by seed, because a seed determines the initial policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agentrl.lab.study.runs import Status, StudyRun
from agentrl.lab.study.settings import SettingValues, StudySettings


@dataclass(frozen=True, kw_only=True)
class MeanWithInterval:
    """A number with its 95 % interval and the number of seeds."""

    value: float
    low: float
    high: float
    seeds: int


def mean_over_seeds(values: Sequence[float] | np.ndarray) -> MeanWithInterval:
    """Return the mean over seeds with Student's 95 % interval. For a single seed, the interval is nan.

    A percentile bootstrap is too narrow for few seeds: its 95 % interval contains the mean of a normal population in
    77 % of studies with 3 seeds and in 85 % with 5. Student's interval contains it in 95 %, but less often if some runs
    collapse; then use :func:`interquartile_mean`. ``benchmarks/coverage.py`` measures both.

    >>> mean_over_seeds([0.5, 0.5, 0.5])
    MeanWithInterval(value=0.5, low=0.5, high=0.5, seeds=3)
    """
    from scipy.stats import t

    sample = np.asarray(values, dtype=float)
    mean, count = float(sample.mean()), len(sample)
    if count < 2:
        return MeanWithInterval(value=mean, low=math.nan, high=math.nan, seeds=count)
    half = float(t.ppf(0.975, count - 1)) * float(sample.std(ddof=1)) / math.sqrt(count)
    return MeanWithInterval(value=mean, low=mean - half, high=mean + half, seeds=count)


def interquartile_mean(values: Sequence[float]) -> MeanWithInterval:
    """Return the interquartile mean (Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice").

    The 95 % interval follows Tukey and McLaughlin (1963). It is nan for a single seed. Of ``n`` values, drop
    ``g = floor(n / 4)`` at each end, which leaves ``h = n - 2 g``. The half-width is the quantile of Student's t with
    ``h - 1`` degrees of freedom times ``s sqrt((n - 1) / (h (h - 1)))``, with the winsorized standard deviation ``s``.

    >>> interquartile_mean([0.0, 0.5, 0.7, 9.0]).value
    0.6
    """
    from scipy.stats import t, trim_mean

    sample = np.sort(np.asarray(values, dtype=float))
    mean, count = float(trim_mean(sample, 0.25)), len(sample)
    if count < 2:
        return MeanWithInterval(value=mean, low=math.nan, high=math.nan, seeds=count)
    cut = count // 4
    left = count - 2 * cut
    deviation = float(sample.clip(sample[cut], sample[-1 - cut]).std(ddof=1))
    half = float(t.ppf(0.975, left - 1)) * deviation * math.sqrt((count - 1) / (left * (left - 1)))
    return MeanWithInterval(value=mean, low=mean - half, high=mean + half, seeds=count)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean difference of a variant from the baseline, paired by seed.

    ``p_value`` is the p-value of the sign-flip test. ``adjusted_p`` is adjusted by Holm's method for all compared
    variants.
    """

    variant: str
    difference: MeanWithInterval
    p_value: float
    adjusted_p: float


def paired_differences(scores: Mapping[str, Mapping[int, float]], baseline: str) -> list[PairedDifference]:
    """Compare every other variant with ``baseline`` on common seeds. ``scores`` has the keys [variant][seed].

    The sign-flip test is exact up to 20 seeds. With n seeds its p-value is at least 2 ** (1 - n). Variants with fewer
    than two common seeds are left out.
    """
    differences: dict[str, np.ndarray] = {}
    reference = scores[baseline]
    for variant, by_seed in scores.items():
        common = sorted(reference.keys() & by_seed.keys())
        if variant != baseline and len(common) >= 2:
            differences[variant] = np.array([by_seed[seed] - reference[seed] for seed in common])
    raw = {variant: sign_flip_p_value(values) for variant, values in differences.items()}
    adjusted = holm_adjusted_p_values(raw)
    return [
        PairedDifference(
            variant=variant, difference=mean_over_seeds(values), p_value=raw[variant], adjusted_p=adjusted[variant]
        )
        for variant, values in differences.items()
    ]


def sign_flip_p_value(values: np.ndarray) -> float:
    """Compute the two-sided sign-flip p-value: the fraction of sign patterns with a mean at least as far from 0.

    The p-value is exact for up to 20 values. For more values, a million random patterns are used.

    >>> sign_flip_p_value(np.array([0.1, 0.2, 0.3]))
    0.25
    """
    from scipy.stats import permutation_test

    if not values.any():
        return 1.0
    # permutation_test enumerates all sign patterns if there are at most 2^20, which holds for up to 20 values.
    tested = permutation_test(
        (values,), lambda sample, axis: sample.mean(axis=axis), permutation_type="samples", n_resamples=2**20,
        vectorized=True, batch=2**14, rng=np.random.default_rng(0),
    )  # fmt: skip
    return min(1.0, float(tested.pvalue))


def holm_adjusted_p_values(raw: Mapping[str, float]) -> dict[str, float]:
    """Adjust p-values for the number of comparisons by Holm's step-down method (1979).

    >>> holm_adjusted_p_values({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(raw.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(raw) - rank)))
        adjusted[name] = highest
    return adjusted


class HeldOutScore(BaseModel):
    """avg@k of a held-out evaluation after ``step`` optimizer steps, with its interval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    mean: float
    low: float
    high: float


class RunCurve(BaseModel):
    """One run of a study. Lists other than ``scores`` contain one entry per training step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str
    seed: int
    settings: SettingValues
    status: Status
    message: str = Field("", description="why the run failed")
    scores: tuple[HeldOutScore, ...] = ()
    steps: tuple[int, ...] = ()
    rewards: tuple[float | None, ...] = Field(
        (), description="mean reward of the step; null if all trajectories were excluded"
    )
    model_tokens: tuple[int, ...] = Field((), description="tokens sampled in the step")
    trajectories: tuple[int, ...] = Field((), description="trajectories of the step that are not excluded")
    seconds: tuple[float, ...] = ()

    @property
    def final_score(self) -> float | None:
        """Last score, or None if the run has not finished."""
        return self.scores[-1].mean if self.status == "finished" and self.scores else None

    @property
    def mean_score_over_steps(self) -> float | None:
        """Mean score over all steps by the trapezoidal rule, or None if the run has not finished."""
        if self.status != "finished" or len(self.scores) < 2:
            return None
        parts = [(after.step - before.step) * (before.mean + after.mean) / 2 for before, after in pairwise(self.scores)]
        return sum(parts) / (self.scores[-1].step - self.scores[0].step)

    def last_and_mean_score_until(self, tokens: int) -> tuple[float, float] | None:
        """Return the score after ``tokens`` sampled tokens, and the mean score up to that point.

        Scores between evaluations are interpolated. Returns None if the run has not finished or sampled fewer tokens.
        """
        spent = dict(zip(self.steps, self.cumulative_tokens, strict=True))
        known = [spent.get(score.step, 0) for score in self.scores]
        if self.status != "finished" or len(known) < 2 or known[-1] < tokens:
            return None
        points = [0, *(value for value in known if 0 < value < tokens), tokens]
        means = np.interp(points, known, [score.mean for score in self.scores])
        return float(means[-1]), float(np.trapezoid(means, points)) / tokens

    def cost_to_reach(self, target: float, spent: Sequence[float]) -> float | None:
        """Sum ``spent`` up to the first evaluation with a score of at least ``target``.

        ``spent`` has one entry for each of ``steps``. Returns None if no evaluation reaches ``target``.
        """
        reached = next((score.step for score in self.scores if score.mean >= target), None)
        if reached is None:
            return None
        return sum(value for step, value in zip(self.steps, spent, strict=True) if step <= reached)

    def has_collapsed(self, share: float) -> bool:
        """Return True if the last score is below ``share`` of the best score."""
        return bool(self.scores) and self.scores[-1].mean < share * max(score.mean for score in self.scores)

    @property
    def cumulative_tokens(self) -> list[int]:
        """Cumulative number of sampled tokens at each step."""
        return list(accumulate(self.model_tokens))


class StudyRecord(BaseModel):
    """A study and all its runs: the data of its tables and figures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agentrl: str
    study: StudySettings
    runs: tuple[RunCurve, ...]


def read_curve(run: StudyRun) -> RunCurve:
    """Read the current state of a run from its files. Raises WorldError if the files are damaged."""
    rows = list(run.run_directory.metrics())
    trained = [row for row in rows if "reward/count" in row]
    return RunCurve(
        variant=run.variant,
        seed=run.seed,
        settings=run.values,
        status=run.status,
        message=run.failure_file.read_text(encoding="utf-8").strip() if run.failure_file.is_file() else "",
        scores=tuple(
            HeldOutScore(step=int(row["step"]), mean=row["eval/avg_at_k"], low=row["eval/low"], high=row["eval/high"])
            for row in rows
            if "eval/avg_at_k" in row
        ),
        steps=tuple(int(row["step"]) for row in trained),
        rewards=tuple(round(row["reward/mean"], 6) if "reward/mean" in row else None for row in trained),
        model_tokens=tuple(int(row.get("rollout/model_tokens", 0)) for row in trained),
        trajectories=tuple(int(row["reward/count"]) for row in trained),
        seconds=tuple(round(row["time/step_s"], 3) for row in trained),
    )
