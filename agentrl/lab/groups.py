"""Groups drawn from the large sample, and the advantages that each estimator gives in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import MissingInputError, compute_advantages
from agentrl.errors import SettingsError
from agentrl.lab.choices import Choice
from agentrl.lab.sample import ProblemSample, inputs_of


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Every problem's sample divided into disjoint groups: ``rows[j]`` [M, N] are row numbers of problem j."""

    rows: tuple[Tensor, ...]

    @property
    def groups(self) -> int:
        return self.rows[0].shape[0]


def draw_partitions(sizes: Sequence[int], group_size: int, count: int, *, seed: int) -> list[Partition]:
    """``count`` random divisions of samples of the given sizes into groups of ``group_size``.

    Disjoint groups of one division are independent draws, so their variance is estimated without bias.
    """
    draw = torch.Generator().manual_seed(seed)
    groups = min(sizes) // group_size
    return [
        Partition(
            rows=tuple(
                torch.randperm(size, generator=draw)[: groups * group_size].reshape(groups, group_size)
                for size in sizes
            )
        )
        for _ in range(count)
    ]


def advantages_in(
    samples: Sequence[ProblemSample], partition: Partition, choice: Choice, *, drop_zero_variance: bool
) -> list[Tensor]:
    """A [M, N, T_j] of every problem j.

    A step holds one group of every problem, as in training, so that whitening and the like see a batch. Raises
    SettingsError for an estimator that asks for an input which rollouts of a policy do not have.
    """
    steps = []
    for place in range(partition.groups):
        inputs = inputs_of(samples, [rows[place] for rows in partition.rows])
        try:
            steps.append(compute_advantages(choice.name, inputs, **choice.options).advantages)
        except MissingInputError as error:
            raise SettingsError(f"--estimators: {choice.label} cannot be measured here: {error}") from error
    size = partition.rows[0].shape[1]
    whole = torch.stack(steps).unflatten(1, (len(samples), size))  # [M, J, N, T]
    result = []
    for index, (sample, rows) in enumerate(zip(samples, partition.rows, strict=True)):
        own = whole[:, index, :, : sample.batch.rewards.shape[1]].clone()
        if drop_zero_variance:
            returns = sample.returns[rows]  # [M, N]
            own[returns.amax(-1) - returns.amin(-1) <= 1e-8] = 0.0
        result.append(own)
    return result
