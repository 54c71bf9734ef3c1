"""The input and output of advantage estimators, checks of the input, and groups of rows that share a baseline."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from agentrl.algorithms.options import InvalidInputError, refuse_first


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The inputs of the estimators. Only the first three are always needed.

    Two trajectories of one problem, the second with an observation (0 in the mask) between two turns:

    >>> import torch
    >>> inputs = AdvantageInputs(
    ...     rewards=torch.tensor([[0., 0., 1., 0.], [0., 0., 0., 0.]]),
    ...     response_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]]).bool(),
    ...     groups=torch.tensor([7, 7]),
    ... )
    >>> from agentrl.algorithms import compute_advantages
    >>> compute_advantages("rloo", inputs).advantages.tolist()
    [[1.0, 1.0, 1.0, 0.0], [-1.0, -1.0, 0.0, -1.0]]

    Values at positions outside the response mask reach no result, whatever they are.

    Rows with the same group and sample are the branches of one rollout, to every estimator one row
    (`agentrl.algorithms.estimators.branches`). Discounts, `gae` and the baselines of tokens follow `parents` and
    `forks`, from the root of the conversation to the token.

    Energies count a token with `(importance_weights * loss_mask)^2`; a missing one of the two counts as 1 on every
    model token. So a token rejected by a zero weight and one rejected by the loss mask give the same baseline. Rewards,
    returns and compact indices are those of the response mask whatever is rejected. `cross_energy` and
    `trajectory_energy` come with the weights already inside, because they do not factor.
    """

    rewards: Tensor  # [B, T] float
    response_mask: Tensor  # [B, T] bool, True on model tokens
    groups: Tensor  # [B] int64, equal for trajectories of one problem
    log_probs: Tensor | None = None  # [B, T] of the policy that is trained
    sum_pi_squared: Tensor | None = None  # [B, T]
    token_energy: Tensor | None = None  # [B, T] w_t as the kernel computes it; without it, formed from the two above
    hidden_norm_squared: Tensor | None = None  # [B, T] for head-exact energy
    cross_energy: Tensor | None = None  # [B, T] sum_{k<=t} rho_k rho_t <delta_k, delta_t>^+, laboratory only
    importance_weights: Tensor | None = None  # [B, T] truncated rho, 0 where rejected from the loss
    loss_mask: Tensor | None = None  # [B, T] bool, the response mask minus what is rejected from the loss
    trajectory_energy: Tensor | None = None  # [B] exact ||sum_t rho_t grad log p_t||^2
    values: Tensor | None = None  # [B, T] critic
    bootstrap_values: Tensor | None = None  # [B] critic's V after the last token; 0, or None for all, where it ended
    greedy_returns: Tensor | None = None  # [B] return of the problem's greedy rollout
    samples: Tensor | None = None  # [B] int64 rollout of the group; rows of one rollout count as one
    branches: Tensor | None = None  # [B] int64 the row's place in its rollout; the last one carries the reward
    parents: Tensor | None = (
        None  # [B] int64 the branch of the same rollout that it forks from; -1, or None for all: none
    )
    forks: Tensor | None = None  # [B] int64 model tokens of that branch before the fork, at least 1


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The result of `compute_advantages`: each [B, T], detached, 0 off model tokens. An estimator returns float64, one
    number a token [B, T] or a trajectory [B, 1]; its values off the model tokens do not matter.

    `returns` holds G_k (token estimators), R on every model token (scalar ones) or A + V (gae), `baselines` what was
    subtracted: without normalisation advantages = returns - baselines, but for gpg's c and grpo's standard deviation.
    """

    advantages: Tensor
    returns: Tensor
    baselines: Tensor

    def take(self, rows: Tensor) -> Advantages:
        """Return some rows."""
        return Advantages(advantages=self.advantages[rows], returns=self.returns[rows], baselines=self.baselines[rows])


_OF_ROLLOUTS = ("groups", "samples", "branches", "parents", "forks")
_PER_TRAJECTORY = (*_OF_ROLLOUTS, "trajectory_energy", "bootstrap_values", "greedy_returns")
_NOT_FLOATING = (*_OF_ROLLOUTS, "response_mask", "loss_mask")


def check_shapes(inputs: AdvantageInputs) -> None:
    """Raise InvalidInputError unless shapes and dtypes are those of the record."""
    if inputs.rewards.ndim != 2:
        raise InvalidInputError(f"rewards must be [B, T]; got {tuple(inputs.rewards.shape)}")
    shape = inputs.rewards.shape
    for field in fields(inputs):
        tensor = getattr(inputs, field.name)
        if tensor is None:
            continue
        expected = shape[:1] if field.name in _PER_TRAJECTORY else shape
        if tensor.shape != expected:
            raise InvalidInputError(f"{field.name} must be {tuple(expected)} like rewards; got {tuple(tensor.shape)}")
        if field.name not in _NOT_FLOATING and not tensor.is_floating_point():
            raise InvalidInputError(f"{field.name} must be floating-point; got {tensor.dtype}")
    if inputs.groups.dtype not in (torch.int64, torch.int32):
        raise InvalidInputError(f"groups must be int64; got {inputs.groups.dtype}")


def check_rows(mask: Tensor, rows: Tensor) -> None:
    """Raise InvalidInputError at the first row of mask [b, T] without a model token."""
    empty = ~mask.any(-1)
    if bool(empty.any()):
        row = int(rows[empty.nonzero()[0]])
        raise InvalidInputError(f"row {row} has no model token; every trajectory must have at least one")


def check_rewards_placed(rewards: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Raise InvalidInputError at the first finite reward off the mask [b, T]."""
    off = rewards.masked_fill(mask, 0)
    if float(off.abs().sum()) == 0.0:
        return
    message = (
        "{name} is {value} in row {row} at position {position}, which is not a model token: assign each reward to "
        "the last model token of its turn"
    )
    refuse_first(torch.isfinite(off) & (off != 0), message, "rewards", rewards, rows)


class Calls(Protocol):
    """The calls that together hold the groups of a step. All make the same requests in the same order."""

    @property
    def index(self) -> int:
        """The number of this call, from 0."""

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of all calls in their order, [calls, ...]; of one shape everywhere."""


class OneCall:
    """The only call of a step: all groups are in it."""

    index = 0

    def gather(self, values: Tensor) -> Tensor:
        """Return ``values`` as [1, ...]."""
        return values.unsqueeze(0)


ONE_CALL = OneCall()


@dataclass(frozen=True, kw_only=True)
class Groups:
    """J groups of at most N of the B rows.

    >>> groups = Groups.of(torch.tensor([7, 3, 7]))
    >>> groups.stack(torch.tensor([1., 2., 3.])).tolist()  # group 3, with an empty place, and group 7
    [[2.0, 1.0], [1.0, 3.0]]
    >>> groups.present.tolist()
    [[True, False], [True, True]]
    >>> groups.mean(torch.tensor([1., 2., 3.])).tolist()
    [2.0, 2.0, 2.0]
    """

    labels: Tensor  # [B] groups renumbered 0 .. J-1
    sizes: Tensor  # [J] rows in each
    slots: Tensor  # [B] where in the flattened [J, N] a row stands
    present: Tensor  # [J, N] bool: places that hold a row
    in_order: bool  # row i stands in place i: stacking is a view

    @classmethod
    def of(cls, ids: Tensor) -> Groups:
        """Return the groups of arbitrary group ids [B], equal for the rows of a group."""
        unique, labels, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        largest = int(sizes.max()) if sizes.numel() else 1  # without rows every reduction over a group still works
        order = labels.argsort(stable=True)
        place = torch.arange(ids.numel(), device=ids.device)
        rank = place - (sizes.cumsum(0) - sizes)[labels[order]]
        slots = torch.empty_like(labels)
        slots[order] = labels[order] * largest + rank
        present = torch.zeros(unique.numel(), largest, dtype=torch.bool, device=ids.device)
        present.view(-1)[slots] = True
        in_order = present.numel() == ids.numel() and bool((slots == place).all())
        return cls(labels=labels, sizes=sizes, slots=slots, present=present, in_order=in_order)

    @property
    def members(self) -> Tensor:
        """Number of rows of the row's group, [B]."""
        return self.sizes[self.labels]

    def stack(self, values: Tensor) -> Tensor:
        """Move [B, ...] to [J, N, ...]. An empty slot repeats a row of the batch; exclude it with `present`."""
        shape = (*self.present.shape, *values.shape[1:])
        if self.in_order:
            return values.reshape(shape)
        rows = torch.zeros(self.present.numel(), dtype=torch.int64, device=values.device)
        rows[self.slots] = torch.arange(values.shape[0], device=values.device)
        return values[rows].reshape(shape)

    def unstack(self, stacked: Tensor) -> Tensor:
        """Move [J, N, ...] to [B, ...], or [J, 1, ...] for values that the group shares."""
        if stacked.shape[1] != self.present.shape[1]:
            return stacked.squeeze(1)[self.labels]
        flat = stacked.flatten(0, 1)
        return flat if self.in_order else flat[self.slots]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the row's group of values [B] -> [B]."""
        return torch.where(self.present, self.stack(values), 0).sum(1)[self.labels]

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the row's group of values [B] -> [B], exact where a group's values are all equal."""
        lowest = self.lowest(values)
        return lowest + self.sum(values - lowest) / self.members

    def lowest(self, values: Tensor) -> Tensor:
        """Smallest of the row's group of values [B] -> [B]."""
        return torch.where(self.present, self.stack(values), torch.inf).amin(1)[self.labels]
