"""A large sample of every problem: rollouts by the trainer's driver, and each token's statistics from one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, cross_energy
from agentrl.models.policy import PolicyModel, scatter_tokens
from agentrl.trajectory import Batch, Group

_TOKEN_VALUES = ("log_probs", "sum_pi_squared", "token_energy", "hidden_norm_squared", "cross_energy")


@dataclass(frozen=True, kw_only=True)
class ProblemSample:
    """S trajectories of one problem. [S, T] tensors are 0 off model tokens."""

    name: str
    batch: Batch
    log_probs: Tensor  # [S, T]
    sum_pi_squared: Tensor  # [S, T]
    token_energy: Tensor  # [S, T] w_t
    hidden_norm_squared: Tensor  # [S, T]
    cross_energy: Tensor  # [S, T] sum_{k <= t} max(0, <delta_k, delta_t>)
    trajectory_energy: Tensor  # [S] exact
    greedy_return: float

    @property
    def size(self) -> int:
        return self.batch.rewards.shape[0]

    @property
    def returns(self) -> Tensor:
        """R [S]."""
        return self.batch.rewards.sum(-1)

    @property
    def lengths(self) -> Tensor:
        """Model tokens [S]."""
        return self.batch.response_mask.sum(-1)


def usable(groups: Sequence[Group], *, size: int) -> tuple[list[Group], dict[str, int]]:
    """The first ``size`` trajectories of every group that has so many and in which their rewards differ; why others
    are not among them."""
    why = {"equal rewards": 0, "too few trajectories that are data": 0}
    kept = []
    for group in groups:
        if len(group.trajectories) < size:
            why["too few trajectories that are data"] += 1
        elif len({item.reward for item in group.trajectories[:size]}) < 2:
            why["equal rewards"] += 1
        else:
            kept.append(group.without(group.trajectories[size:]))
    return kept, {name: count for name, count in why.items() if count}


def look_at(
    policy: PolicyModel, group: Group, *, pad_id: int, temperature: float, budget: int, greedy_return: float
) -> ProblemSample:
    """Statistics and exact energies of a group's trajectories, in micro-batches of at most ``budget`` tokens."""
    batch = Batch.from_trajectories(group.trajectories, pad_id=pad_id)
    shape = batch.response_mask.shape
    tokens = {name: torch.zeros(shape) for name in _TOKEN_VALUES}
    energies = torch.zeros(shape[0])
    for rows in row_blocks(batch, budget):
        mask = batch.response_mask[rows]
        with torch.no_grad():
            statistics, hidden = policy(
                batch.input_ids[rows], batch.prompt_lengths[rows], batch.response_ids[rows], mask, temperature, True
            )
            cross = _cross_energies(policy, hidden, batch.response_ids[rows], mask, temperature)
        found = {**vars(statistics), "token_energy": statistics.energy, "cross_energy": cross}
        for name, values in tokens.items():
            values[rows] = scatter_tokens(found[name].float(), mask)
        energies[rows] = policy.trajectory_energies(
            batch.input_ids[rows], batch.prompt_lengths[rows], mask, temperature=temperature
        ).float()
    return ProblemSample(
        name=group.problem.id, batch=batch, trajectory_energy=energies, greedy_return=greedy_return, **tokens
    )


def inputs_of(samples: Sequence[ProblemSample], rows: Sequence[Tensor]) -> AdvantageInputs:
    """What estimators may use of one step: the rows [N] chosen of every problem, one group a problem."""
    width = max(sample.batch.rewards.shape[1] for sample in samples)

    def gather(name: str) -> Tensor:
        parts = []
        for sample, chosen in zip(samples, rows, strict=True):
            source = sample.batch if hasattr(sample.batch, name) else sample
            values = getattr(source, name)[chosen]
            parts.append(torch.nn.functional.pad(values, (0, width - values.shape[1])))
        return torch.cat(parts)

    def each(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value[chosen] for value, chosen in zip(values, rows, strict=True)])

    return AdvantageInputs(
        rewards=gather("rewards").double(),
        response_mask=gather("response_mask"),
        groups=torch.cat([torch.full_like(chosen, index) for index, chosen in enumerate(rows)]),
        trajectory_energy=each([sample.trajectory_energy for sample in samples]),
        greedy_returns=each([torch.full((sample.size,), sample.greedy_return) for sample in samples]),
        **{name: gather(name) for name in _TOKEN_VALUES},
    )


def row_blocks(batch: Batch, budget: int) -> Iterator[slice]:
    """Consecutive rows of at most ``budget`` tokens without their padding, or single rows."""
    start = tokens = 0
    for row, length in enumerate((batch.prompt_lengths + batch.response_lengths).tolist()):
        if row > start and tokens + length > budget:
            yield slice(start, row)
            start, tokens = row, 0
        tokens += length
    yield slice(start, batch.input_ids.shape[0])


def _cross_energies(policy: PolicyModel, hidden: Tensor, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """sum_{k <= t} max(0, <delta_k, delta_t>) [n] from hidden [n, D] of the model tokens, a row at a time."""
    lengths = mask.sum(-1).tolist()
    parts = []
    for states, targets in zip(hidden.split(lengths), ids[mask].split(lengths), strict=True):
        logits, slope = policy.head.logit_map.with_slope(policy.head(states).float())
        parts.append(cross_energy(torch.log_softmax(logits / temperature, dim=-1), targets, slope=slope).float())
    return torch.cat(parts)
