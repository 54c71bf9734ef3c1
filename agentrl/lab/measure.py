"""Exact moments of the gradient estimate of one problem, by estimator and group size.

For group size N, g_m is the gradient of group m: the mean over its N trajectories of sum_t A_t grad ln p_t. The
trajectories of a problem are divided into M disjoint groups, several times. Products are taken only between independent
trajectories: g_m with g_m', and g_m with the scores of trajectories outside the group. They are therefore unbiased for
the products of the expectations. A reference gradient that contained the group's trajectories would share its noise.

Problems are measured one after another, and only their moments are kept.
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
    """Moments of one estimator's gradient on one problem at one group size, averaged over the divisions."""

    variance: float  # of one group's gradient: sum_m ||g_m - mean g||^2 / (M - 1)
    mean_squared: float  # squared norm of the expected gradient: mean <g_m, g_m'>, m != m'
    along: float  # product of the expected gradient with the true gradient, <E g, g*>
    reference_squared: float  # squared norm of the true gradient, ||g*||^2, from all trajectories
    reference_along: float  # <E g, g*> of the leave-one-out gradient on the same groups, which estimates ||g*||^2
    along_variance: float | None  # Var <g, g*>; None if too few trajectories are outside two groups
    along_squared: float | None  # <E g, g*>^2
    head_variance: float | None  # exact variance of the head's gradient alone; None if not requested
    diagonal: float  # mean over groups of sum_i sum_t w_t A_t^2 / N^2, the diagonal proxy of the power


def named_moments(values: Mapping[str, float | None]) -> GradientMoments:
    """Build GradientMoments from a mapping of field names to values."""
    fields: dict[str, Any] = dict(values)
    return GradientMoments(**fields)


ProblemMoments = dict[int, dict[str, GradientMoments]]
"""Moments of one problem, by group size and estimator label."""


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
    """Yield (index, moments) for each problem, with the moments of every choice at every group size.

    ``numbers`` identify the problems; together with ``seed`` they determine the division into groups. Problems in
    ``skip`` are not measured, but belong to the step of estimators that span the step.
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
        (key, choice.label): advantages_in(samples, drawn, choice, drop_zero_variance=settings.drop_zero_variance)
        for key, drawn in rows.items()
        for choice in choices
    }
    for index, (sample, number) in enumerate(zip(samples, numbers, strict=True)):
        if number not in skip:
            own_rows = {key: drawn[index] for key, drawn in rows.items()}
            own_advantages = {key: tensors[index] for key, tensors in advantages.items()}
            labels = [choice.label for choice in choices]
            yield index, _moments(policy, sample, own_rows, own_advantages, labels, settings, temperature)


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
            tensors = [advantages[(size, division), label] for label in labels]
            products = gradients.products(drawn, tensors)
            heads = [None if hidden is None else head_variance(policy, hidden, sample, drawn, values, temperature)
                     for values in tensors]  # fmt: skip
            for label, one in zip(labels, _of_groups(sample, truth, drawn, tensors, products, heads), strict=True):
                parts[label].append(one)
        result[size] = {label: _mean(moments) for label, moments in parts.items()}
    return result


def _of_groups(
    sample: ProblemSample,
    truth: TrueGradient,
    rows: Tensor,
    advantages: Sequence[Tensor],
    products: Sequence[GroupProducts],
    heads: Sequence[float | None],
) -> Iterator[GradientMoments]:
    """Moments of each estimator from one division into groups ``rows`` [M, N]."""
    with_scores = torch.stack([item.with_scores for item in products])
    along, paired = truth.along(rows, with_scores)
    directional = truth.along_moments(rows, with_scores)
    for index, (item, values) in enumerate(zip(products, advantages, strict=True)):
        yield GradientMoments(
            variance=item.variance,
            mean_squared=item.mean_squared,
            along=float(along[index]),
            reference_squared=truth.squared,
            reference_along=paired,
            along_variance=None if directional is None else float(directional[0][index]),
            along_squared=None if directional is None else float(directional[1][index]),
            head_variance=heads[index],
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
    """Variance of a group's gradient with respect to the head's weight.

    ``hidden`` contains, for each trajectory, the states [K, D] that predict its model tokens.
    """
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
    assert measured.variance is not None  # because there are at least two groups
    return measured.variance * count
