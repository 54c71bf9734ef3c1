"""Exact moments of the gradient estimate of one problem, estimator by estimator, group size by group size.

For group size N: g_m is the gradient of group m (mean over its N trajectories of sum_t A_t grad ln p_t), of M disjoint
groups, in several divisions of the problem's trajectories into groups. Products are taken between independent
trajectories only (g_m with g_m', g_m with the scores of trajectories outside of the group), so they are unbiased for
those of the expectations: a reference that holds the group's own rows shares its noise, the more so the noisier the
estimator. Moments are what is kept of a problem; problems are measured one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms import HeadVarianceAccumulator, diagonal_proxy
from agentrl.lab.choices import Choice, advantages_in, draw_groups
from agentrl.lab.gradients import Gradients, GroupProducts
from agentrl.lab.sample import ProblemSample
from agentrl.lab.settings import LabSettings
from agentrl.lab.truth import TrueGradient
from agentrl.models.policy import PolicyModel


@dataclass(frozen=True, kw_only=True)
class GradientMoments:
    """Moments of one estimator's gradient on one problem at one group size; means over the divisions."""

    variance: float  # of one group's gradient: sum_m ||g_m - mean g||^2 / (M - 1)
    mean_squared: float  # of the expectation: mean <g_m, g_m'>, m != m'
    along: float  # of the expectation with the true gradient, <E g, g*>
    reference_squared: float  # of the true gradient, ||g*||^2, from all trajectories
    reference_along: float  # ||g*||^2 as <E g, g*> of the leave-one-out gradient, with the same groups
    along_variance: float | None  # Var <g, g*>; None if too few trajectories are outside of two groups
    along_squared: float | None  # <E g, g*>^2
    head_variance: float | None  # the variance of the head's gradient alone, exact; None if it is not asked for
    diagonal: float  # mean over groups of sum_i sum_t w_t A_t^2 / N^2, the diagonal proxy of the power


def named_moments(values: Mapping[str, float | None]) -> GradientMoments:
    """From values by name."""
    given: dict[str, Any] = dict(values)
    return GradientMoments(**given)


ProblemMoments = dict[int, dict[str, GradientMoments]]
"""Of one problem: by group size, by the estimator's label."""


def measure(
    policy: PolicyModel,
    samples: Sequence[ProblemSample],
    numbers: Sequence[int],
    choices: Sequence[Choice],
    settings: LabSettings,
    *,
    temperature: float,
    seed: int,
    skip: Set[int] = frozenset(),
) -> Iterator[tuple[int, ProblemMoments]]:
    """(index, moments) of one problem after another, of every choice at every group size.

    ``numbers`` are those of the problems: with ``seed`` they decide how trajectories are grouped; those in ``skip`` are
    not measured. All of the problems are one step to estimators that look at the whole step.
    """
    rows = {
        (size, division): [
            draw_groups(sample.size, size, most=settings.groups, seed=seed, problem=number, division=division)
            for sample, number in zip(samples, numbers, strict=True)
        ]
        for size in settings.group_sizes
        for division in range(settings.partitions)
    }
    advantages = {
        (place, choice.label): advantages_in(samples, drawn, choice, drop_zero_variance=settings.drop_zero_variance)
        for place, drawn in rows.items()
        for choice in choices
    }
    for index, (sample, number) in enumerate(zip(samples, numbers, strict=True)):
        if number not in skip:
            own_rows = {place: drawn[index] for place, drawn in rows.items()}
            own = {place: given[index] for place, given in advantages.items()}
            labels = [choice.label for choice in choices]
            yield index, _moments(policy, sample, own_rows, own, labels, settings, temperature)


def _moments(
    policy: PolicyModel,
    sample: ProblemSample,
    rows: Mapping[tuple[int, int], Tensor],
    advantages: Mapping[tuple[tuple[int, int], str], Tensor],
    labels: Sequence[str],
    settings: LabSettings,
    temperature: float,
) -> ProblemMoments:
    gradients = Gradients(policy, sample, temperature=temperature, memory=settings.score_memory)
    truth = TrueGradient(sample.returns, gradients.gram)
    hidden = gradients.hidden(torch.arange(sample.size)).split(sample.lengths.tolist()) if settings.head else None
    result: ProblemMoments = {}
    for size in settings.group_sizes:
        parts: dict[str, list[GradientMoments]] = {label: [] for label in labels}
        for division in range(settings.partitions):
            drawn = rows[size, division]
            given = [advantages[(size, division), label] for label in labels]
            found = gradients.products(drawn, given)
            heads = [None if hidden is None else head_variance(policy, hidden, sample, drawn, values, temperature)
                     for values in given]  # fmt: skip
            for label, one in zip(labels, _of_groups(sample, truth, drawn, given, found, heads), strict=True):
                parts[label].append(one)
        result[size] = {label: _mean(own) for label, own in parts.items()}
    return result


def _of_groups(
    sample: ProblemSample,
    truth: TrueGradient,
    rows: Tensor,
    advantages: Sequence[Tensor],
    found: Sequence[GroupProducts],
    heads: Sequence[float | None],
) -> Iterator[GradientMoments]:
    """Of each estimator, from one division into groups ``rows`` [M, N]."""
    with_scores = torch.stack([item.with_scores for item in found])
    along, paired = truth.along(rows, with_scores)
    directional = truth.along_moments(rows, with_scores)
    for place, (item, values) in enumerate(zip(found, advantages, strict=True)):
        yield GradientMoments(
            variance=item.variance,
            mean_squared=item.mean_squared,
            along=float(along[place]),
            reference_squared=truth.squared,
            reference_along=paired,
            along_variance=None if directional is None else float(directional[0][place]),
            along_squared=None if directional is None else float(directional[1][place]),
            head_variance=heads[place],
            diagonal=_diagonal(sample, rows, values),
        )


def _mean(parts: Sequence[GradientMoments]) -> GradientMoments:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return named_moments({name: mean([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def _diagonal(sample: ProblemSample, rows: Tensor, advantages: Tensor) -> float:
    flat = rows.flatten()
    mask = sample.batch.response_mask[flat]
    ratios = 1.0 if sample.importance_weights is None else sample.importance_weights[flat]
    values = diagonal_proxy(sample.token_energy[flat], advantages.flatten(0, 1) * ratios, mask)
    return float(values.sum()) / (rows.numel() * rows.shape[1])


def head_variance(
    policy: PolicyModel,
    hidden: Sequence[Tensor],
    sample: ProblemSample,
    rows: Tensor,
    advantages: Tensor,
    temperature: float,
) -> float:
    """Variance of the gradient of the head's weight of a group. ``hidden``: the states [K, D] that predict each
    trajectory's model tokens."""
    count, size = rows.shape
    head, logit_map = policy.head, policy.head.logit_map
    accumulator = HeadVarianceAccumulator(
        head.weight, temperature=logit_map.temperature(temperature), bias=head.bias, cap=logit_map.output_cap
    )
    flat, weights = rows.flatten(), advantages.flatten(0, 1)
    if sample.importance_weights is not None:
        weights = weights * sample.importance_weights[flat]
    mask = sample.batch.response_mask[flat]
    accumulator.update(
        hidden=torch.cat([hidden[row] for row in flat.tolist()]),
        targets=sample.batch.response_ids[flat][mask],
        advantages=weights[mask],
        rows=mask.nonzero()[:, 0],
        groups=torch.arange(count).repeat_interleave(size),
    )
    measured = accumulator.result()
    assert measured.variance is not None  # two groups at least
    return measured.variance * count
