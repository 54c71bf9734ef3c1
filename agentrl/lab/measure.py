"""Exact moments of the gradient estimate, problem by problem, estimator by estimator, group size by group size.

For problem j and group size N: g_m the gradient of group m (mean over its N trajectories of sum_t A_t grad ln p_t),
M disjoint groups in a partition, several partitions. g* is the reference: the unbiased leave-one-out gradient over the
problem's whole sample.
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
class Moments:
    """What one problem says of one estimator at one group size."""

    variance: float  # of one group's gradient: mean over partitions of sum_m ||g_m - mean g||^2 / (M - 1)
    power: float  # mean ||g_m||^2
    mean_squared: float  # ||mean_m g_m||^2
    along: float  # <mean_m g_m, g*>
    reference_squared: float  # ||g*||^2
    head_variance: float  # the variance of the head's gradient alone, exact
    diagonal: float  # mean over groups of sum_i sum_t w_t A_t^2 / N^2, the diagonal proxy of the power


@dataclass(kw_only=True)
class Measurement:
    """Everything that was measured: ``moments[N][label][j]``, ``signal[N][label]`` = ||mean_j mean_m g_jm||^2."""

    problems: list[str]
    parameters: int
    moments: dict[int, dict[str, list[Moments]]] = field(default_factory=dict)
    signal: dict[int, dict[str, float]] = field(default_factory=dict)


class Spread:
    """Mean, power and unbiased variance of vectors that come in partitions."""

    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size)
        self._power = self._variance = 0.0
        self._groups = self._partitions = 0

    def add_partition(self, vectors: Sequence[Tensor]) -> None:
        """The gradients of disjoint groups. At least two."""
        count = len(vectors)
        whole = torch.stack(list(vectors)).sum(0)
        power = sum(float(item.double().square().sum()) for item in vectors)
        self._variance += (power - float(whole.double().square().sum()) / count) / (count - 1)
        self._power += power
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
        reference = reference_gradient(gradients, sample, settings.micro_batch_tokens)
        for size, drawn in partitions.items():
            own = {label: [given[index] for given in found] for label, found in advantages[size].items()}
            rows = [one.rows[index] for one in drawn]
            spreads = spread_of(gradients, rows, own)
            for label, spread in spreads.items():
                mean = spread.mean
                head, diagonal = proxies_of(policy, hidden, sample, rows, own[label], temperature)
                found = Moments(
                    variance=spread.variance,
                    power=spread.power,
                    mean_squared=float(mean.double().square().sum()),
                    along=float(mean.double() @ reference.double()),
                    reference_squared=float(reference.double().square().sum()),
                    head_variance=head,
                    diagonal=diagonal,
                )
                result.moments.setdefault(size, {}).setdefault(label, []).append(found)
                sums[size][label] = sums[size].get(label, torch.zeros(gradients.size)) + mean / len(samples)
        progress(index + 1)
    for size, totals in sums.items():
        result.signal[size] = {label: float(total.double().square().sum()) for label, total in totals.items()}
    return result


def reference_gradient(gradients: Gradients, sample: ProblemSample, budget: int) -> Tensor:
    """(1/S) sum_i (R_i - mean of the others) grad ln p(tau_i): unbiased, over the whole sample of S."""
    returns = sample.returns.double()
    size = sample.size
    advantages = (returns - returns.mean()) * size / (size - 1)
    values = torch.where(sample.batch.response_mask, advantages.unsqueeze(-1), 0.0)
    return gradients.sum_over_all(values, budget) / size


def spread_of(
    gradients: Gradients, rows: Sequence[Tensor], advantages: Mapping[str, Sequence[Tensor]]
) -> dict[str, Spread]:
    """The spread of every estimator's group gradients; ``rows`` [M, N] and ``advantages`` [M, N, T] a partition."""
    spreads = {label: Spread(gradients.size) for label in advantages}
    for place, groups in enumerate(rows):
        vectors: dict[str, list[Tensor]] = {label: [] for label in advantages}
        for group, chosen in enumerate(groups):
            found = gradients.weighed(chosen, [values[place][group] for values in advantages.values()])
            for label, vector in zip(advantages, found, strict=True):
                vectors[label].append(vector)
        for label, spread in spreads.items():
            spread.add_partition(vectors[label])
    return spreads


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
        accumulator = HeadVarianceAccumulator(policy.head.weight, temperature=temperature, bias=policy.head.bias)
        flat, weights = groups.flatten(), values.flatten(0, 1)
        mask = sample.batch.response_mask[flat]
        accumulator.update(
            hidden=torch.cat([hidden[row] for row in flat.tolist()]),
            targets=sample.batch.response_ids[flat][mask],
            advantages=weights[mask],
            rows=mask.nonzero()[:, 0],
            groups=torch.arange(count).repeat_interleave(size),
        )
        head = accumulator.result()
        assert head.variance is not None  # two groups at least
        head_total += head.variance * count
        diagonal_total += float(diagonal_proxy(sample.token_energy[flat], weights, mask).sum()) / (count * size**2)
    return max(0.0, head_total / len(rows)), diagonal_total / len(rows)
