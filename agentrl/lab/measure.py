"""Exact moments of the gradient estimate, problem by problem, estimator by estimator, group size by group size.

For problem j and group size N: g_m the gradient of group m (mean over its N trajectories of sum_t A_t grad ln p_t),
M disjoint groups in a partition, several partitions. The reference for group m is g*_m: the unbiased leave-one-out
gradient (REINFORCE with the mean of the others) over all of the problem's sample that is not in the group. Inner
products are taken between independent rows only (g_m with g*_m, g_m with g_m' of the same partition), so they are
unbiased for those of the expectations: a reference that holds the group's own rows shares its noise, the more so the
noisier the estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algorithms import HeadVarianceAccumulator, diagonal_proxy
from agentrl.lab.choices import Choice
from agentrl.lab.gradients import Gradients
from agentrl.lab.groups import advantages_in, draw_partitions
from agentrl.lab.sample import ProblemSample
from agentrl.lab.settings import LabSettings
from agentrl.models.policy import PolicyModel

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class GradientMoments:
    """Moments of one estimator's gradient on one problem at one group size."""

    variance: float  # of one group's gradient: mean over partitions of sum_m ||g_m - mean g||^2 / (M - 1)
    power: float  # mean ||g_m||^2
    drawn_squared: float  # ||mean_m g_m||^2, of the groups drawn
    mean_squared: float  # of the expectation: mean <g_m, g_m'>, m != m'
    along: float  # of the expectation with the true gradient: mean <g_m, g*_m>
    reference_squared: float  # of the true gradient: mean <leave-one-out gradient of group m, g*_m>
    head_variance: float  # the variance of the head's gradient alone, exact
    diagonal: float  # mean over groups of sum_i sum_t w_t A_t^2 / N^2, the diagonal proxy of the power


@dataclass(kw_only=True)
class Measurement:
    """Everything that was measured: ``moments[N][label][j]``, ``signal[N][label]`` = ||mean_j mean_m g_jm||^2."""

    problems: list[str]
    parameters: int
    moments: dict[int, dict[str, list[GradientMoments]]] = field(default_factory=dict)
    signal: dict[int, dict[str, float]] = field(default_factory=dict)


class Spread:
    """Mean, power and unbiased variance of vectors that come in partitions."""

    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size)
        self._power = self._variance = self._along = 0.0
        self._groups = self._partitions = 0

    def add_partition(self, vectors: Sequence[Tensor], references: Sequence[Tensor]) -> None:
        """The gradients of disjoint groups, at least two, and the reference of each."""
        count = len(vectors)
        whole = torch.stack(list(vectors)).sum(0)
        power = sum(float(item.double().square().sum()) for item in vectors)
        self._variance += (power - float(whole.double().square().sum()) / count) / (count - 1)
        self._power += power
        self._along += sum(float(a.double() @ b.double()) for a, b in zip(vectors, references, strict=True))
        self.total += whole
        self._groups += count
        self._partitions += 1

    @property
    def mean(self) -> Tensor:
        return self.total / self._groups

    @property
    def power(self) -> float:
        return self._power / self._groups

    @property
    def variance(self) -> float:
        return max(0.0, self._variance / self._partitions)

    @property
    def mean_squared(self) -> float:
        """The squared norm of the expectation: what of the power is not variance."""
        return self.power - self._variance / self._partitions

    @property
    def along(self) -> float:
        return self._along / self._groups


def measure(
    policy: PolicyModel,
    samples: Sequence[ProblemSample],
    choices: Sequence[Choice],
    settings: LabSettings,
    *,
    temperature: float,
    seed: int,
    progress: Progress = lambda done: None,
) -> Measurement:
    """Moments of every choice at every group size. Deterministic in ``seed``."""
    partitions = {
        size: draw_partitions([item.size for item in samples], size, settings.partitions, seed=seed + size)
        for size in settings.group_sizes
    }
    # advantages[N][label][partition][problem] is [M, N, T]
    advantages = {
        size: {
            choice.label: [
                advantages_in(samples, one, choice, drop_zero_variance=settings.drop_zero_variance) for one in drawn
            ]
            for choice in choices
        }
        for size, drawn in partitions.items()
    }
    sums: dict[int, dict[str, Tensor]] = {size: {} for size in partitions}
    result = Measurement(
        problems=[item.name for item in samples],
        parameters=sum(item.numel() for item in policy.parameters() if item.requires_grad),
    )
    for index, sample in enumerate(samples):
        gradients = Gradients(policy, sample.batch, temperature=temperature, score_memory=settings.score_memory)
        hidden = gradients.hidden(torch.arange(sample.size)).split(sample.lengths.tolist())
        references = References(gradients, sample, settings.micro_batch_tokens)
        for size, drawn in partitions.items():
            own = {label: [given[index] for given in found] for label, found in advantages[size].items()}
            rows = [one.rows[index] for one in drawn]
            true, spreads = spread_of(gradients, references, rows, own)
            for label, spread in spreads.items():
                head, diagonal = proxies_of(policy, hidden, sample, rows, own[label], temperature)
                found = GradientMoments(
                    variance=spread.variance,
                    power=spread.power,
                    drawn_squared=float(spread.mean.double().square().sum()),
                    mean_squared=spread.mean_squared,
                    along=spread.along,
                    reference_squared=true.along,
                    head_variance=head,
                    diagonal=diagonal,
                )
                result.moments.setdefault(size, {}).setdefault(label, []).append(found)
                sums[size][label] = sums[size].get(label, torch.zeros(gradients.size)) + spread.mean / len(samples)
        progress(index + 1)
    for size, totals in sums.items():
        result.signal[size] = {label: float(total.double().square().sum()) for label, total in totals.items()}
    return result


class References:
    """Leave-one-out gradients of parts of one problem's sample.

    Over n rows that is (1/n) sum_i (R_i - mean of the others) s_i = n/(n-1) (mean R s - mean R mean s), s_i the
    gradient of ln p(tau_i); so sums of R s and s over all rows and over a group give that of the group and of all
    others.
    """

    def __init__(self, gradients: Gradients, sample: ProblemSample, budget: int) -> None:
        self._gradients = gradients
        self._returns = sample.returns
        self._width = sample.batch.response_mask.shape[1]
        ones = torch.ones(sample.size, self._width)
        self._weighed = gradients.sum_over_all(ones * self._returns[:, None], budget)
        self._plain = gradients.sum_over_all(ones, budget)

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(the gradient over `rows`, the gradient over all rows but those), independent of each other."""
        count, others = len(rows), len(self._returns) - len(rows)
        ones = torch.ones(count, self._width)
        weighed, plain = self._gradients.weighed(rows, [ones * self._returns[rows][:, None], ones])
        total = self._returns[rows].sum()
        rest = (self._weighed - count * weighed) / others, (self._plain - count * plain) / others
        own = (weighed - total / count * plain) * count / (count - 1)
        return own, (rest[0] - (self._returns.sum() - total) / others * rest[1]) * others / (others - 1)


def spread_of(
    gradients: Gradients, references: References, rows: Sequence[Tensor], advantages: Mapping[str, Sequence[Tensor]]
) -> tuple[Spread, dict[str, Spread]]:
    """(of the leave-one-out gradient, of every estimator's): the spread of group gradients.

    `rows` [M, N] and `advantages` [M, N, T], one for each partition.
    """
    true, spreads = Spread(gradients.size), {label: Spread(gradients.size) for label in advantages}
    for place, groups in enumerate(rows):
        vectors: dict[str, list[Tensor]] = {label: [] for label in advantages}
        own, others = [], []
        for group, chosen in enumerate(groups):
            found = gradients.weighed(chosen, [values[place][group] for values in advantages.values()])
            for label, vector in zip(advantages, found, strict=True):
                vectors[label].append(vector)
            inside, outside = references.of(chosen)
            own.append(inside)
            others.append(outside)
        true.add_partition(own, others)
        for label, spread in spreads.items():
            spread.add_partition(vectors[label], others)
    return true, spreads


def proxies_of(
    policy: PolicyModel,
    hidden: Sequence[Tensor],
    sample: ProblemSample,
    rows: Sequence[Tensor],
    advantages: Sequence[Tensor],
    temperature: float,
) -> tuple[float, float]:
    """(variance of the head's gradient of a group, diagonal proxy of its squared norm), means over partitions.

    `hidden`: the states [K, D] that predict each trajectory's model tokens.
    """
    head_total = diagonal_total = 0.0
    for groups, values in zip(rows, advantages, strict=True):
        count, size = groups.shape
        head, logit_map = policy.head, policy.head.logit_map
        accumulator = HeadVarianceAccumulator(
            head.weight, temperature=logit_map.temperature(temperature), bias=head.bias, cap=logit_map.output_cap
        )
        flat, weights = groups.flatten(), values.flatten(0, 1)
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
        head_total += measured.variance * count
        diagonal_total += float(diagonal_proxy(sample.token_energy[flat], weights, mask).sum()) / (count * size**2)
    return max(0.0, head_total / len(rows)), diagonal_total / len(rows)
