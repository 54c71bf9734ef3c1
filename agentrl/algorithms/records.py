"""The input and output of advantage estimators, checks of the input, and groups of rows that share a baseline."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from agentrl.algorithms.options import InvalidInputError, raise_at_first_invalid


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Inputs of the estimators. Only the first three fields are always required.

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

    Values at positions outside the response mask have no effect.

    Rows with the same group and sample are the branches of one rollout, which every estimator treats as one row
    (`agentrl.algorithms.estimators.branches`). Discounts, `gae` and token baselines follow `parents` and `forks`, from
    the root of the conversation to the token.

    If `path_weights` are below 1, the branches are alternatives. The rollout is then a tree with a reward at each leaf.
    Estimators treat every path from the root to a leaf as one row with the weight of the leaf
    (`agentrl.algorithms.estimators.forks`). Each branch begins after the last model token of its parent.

    Energies weight a token with `(importance_weights * loss_mask)^2`. A factor that is None is 1 on every model token.
    Therefore a zero weight and the loss mask reject a token with the same effect on the baseline. Rewards,
    returns and compact indices use the response mask, including rejected tokens. `trajectory_energy` already includes
    the weights, because they cannot be factored out.
    """

    rewards: Tensor  # [B, T] float
    response_mask: Tensor  # [B, T] bool, True on model tokens
    groups: Tensor  # [B] int64, equal for trajectories of one problem
    log_probs: Tensor | None = None  # [B, T] under the policy in training
    sum_pi_squared: Tensor | None = None  # [B, T]
    token_energy: Tensor | None = None  # [B, T] w_t of the kernel; if None, computed from the two fields above
    hidden_norm_squared: Tensor | None = None  # [B, T] ||h||^2, for the head-exact energy
    importance_weights: Tensor | None = None  # [B, T] truncated rho, 0 for tokens rejected from the loss
    loss_mask: Tensor | None = None  # [B, T] bool, the response mask without tokens rejected from the loss
    trajectory_energy: Tensor | None = None  # [B] exact ||sum_t rho_t grad log p_t||^2
    values: Tensor | None = None  # [B, T] critic
    bootstrap_values: Tensor | None = None  # [B] critic's V after the last token, 0 if the episode ended; None: all 0
    greedy_returns: Tensor | None = None  # [B] return of the problem's greedy rollout
    samples: Tensor | None = None  # [B] int64 index of the rollout in its group; rows of one rollout count as one
    branches: Tensor | None = None  # [B] int64 index of the row in its rollout; the last one has the reward
    parents: Tensor | None = (
        None  # [B] int64 the branch of the same rollout from which the row forks, -1 for a root; None: all -1
    )
    forks: Tensor | None = None  # [B] int64 number of that branch's model tokens before the fork, at least 1
    path_weights: Tensor | None = None  # [B] weight of the row in a forked rollout; None: all 1


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The result of `compute_advantages`: detached tensors [B, T] with 0 outside model tokens.

    An estimator returns float64, one number per token [B, T] or per trajectory [B, 1], with any values outside model
    tokens.

    `returns` holds G_k (token estimators), R on every model token (scalar ones) or A + V (gae), `baselines` the
    subtracted values. Without normalization, advantages = returns - baselines, except for gpg's factor c and grpo's
    standard deviation.
    """

    advantages: Tensor
    returns: Tensor
    baselines: Tensor

    def select_rows(self, rows: Tensor) -> Advantages:
        """Return the results for `rows`."""
        return Advantages(advantages=self.advantages[rows], returns=self.returns[rows], baselines=self.baselines[rows])


_OF_ROLLOUTS = ("groups", "samples", "branches", "parents", "forks")
_PER_TRAJECTORY = (*_OF_ROLLOUTS, "path_weights", "trajectory_energy", "bootstrap_values", "greedy_returns")
_NOT_FLOATING = (*_OF_ROLLOUTS, "response_mask", "loss_mask")


def check_shapes(inputs: AdvantageInputs) -> None:
    """Raise InvalidInputError unless shapes and dtypes match the record's definition."""
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


def check_rows_have_tokens(mask: Tensor, rows: Tensor) -> None:
    """Raise InvalidInputError if a row of the mask [b, T] has no model token."""
    empty = ~mask.any(-1)
    if bool(empty.any()):
        row = int(rows[empty.nonzero()[0]])
        raise InvalidInputError(f"row {row} has no model token; every trajectory must have at least one")


def check_rewards_on_mask(rewards: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Raise InvalidInputError if a finite, nonzero reward is outside the mask [b, T]."""
    off = rewards.masked_fill(mask, 0)
    if float(off.abs().sum()) == 0.0:
        return
    message = (
        "{name} is {value} in row {row} at position {position}, which is not a model token: assign each reward to "
        "the last model token of its turn"
    )
    raise_at_first_invalid(torch.isfinite(off) & (off != 0), message, "rewards", rewards, rows)


class Communicator(Protocol):
    """Exchanges tensors between the holders of a step's groups.

    All participants must make the same calls in the same order.
    """

    @property
    def participant_index(self) -> int:
        """Index of this participant, from 0."""

    def all_gather(self, values: Tensor) -> Tensor:
        """Return ``values`` of all participants in order, [participants, ...]. Shapes must be equal."""


class LocalCommunicator:
    """Communicator of a single participant that holds all groups."""

    participant_index = 0

    def all_gather(self, values: Tensor) -> Tensor:
        """Return ``values`` as [1, ...]."""
        return values.unsqueeze(0)


LOCAL_COMMUNICATOR = LocalCommunicator()


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A partition of B rows into J groups of at most N rows. Results [B] contain the value of each row's group.

    >>> groups = Groups.from_ids(torch.tensor([7, 3, 7]))
    >>> groups.stack(torch.tensor([1., 2., 3.])).tolist()  # group 3, with an empty slot, and group 7
    [[2.0, 1.0], [1.0, 3.0]]
    >>> groups.present.tolist()
    [[True, False], [True, True]]
    >>> groups.broadcast_group_mean(torch.tensor([1., 2., 3.])).tolist()
    [2.0, 2.0, 2.0]
    """

    labels: Tensor  # [B] groups renumbered 0 .. J-1
    sizes: Tensor  # [J] number of rows of each group
    row_indices: Tensor  # [B] index of each row in the flattened [J, N]
    present: Tensor  # [J, N] bool, True for slots with a row
    in_order: bool  # True if row i has slot i, so that stacking is a view
    weights: Tensor | None = None  # [B] weight of each row in sums and means; None: all 1

    @classmethod
    def from_ids(cls, ids: Tensor, weights: Tensor | None = None) -> Groups:
        """Create the groups from arbitrary ids [B], which are equal for the rows of a group."""
        unique, labels, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        largest = int(sizes.max()) if sizes.numel() else 1  # 1 without rows, so that reductions work
        order = labels.argsort(stable=True)
        place = torch.arange(ids.numel(), device=ids.device)
        rank = place - (sizes.cumsum(0) - sizes)[labels[order]]
        slots = torch.empty_like(labels)
        slots[order] = labels[order] * largest + rank
        present = torch.zeros(unique.numel(), largest, dtype=torch.bool, device=ids.device)
        present.view(-1)[slots] = True
        in_order = present.numel() == ids.numel() and bool((slots == place).all())
        return cls(labels=labels, sizes=sizes, row_indices=slots, present=present, in_order=in_order, weights=weights)

    @property
    def group_size_by_row(self) -> Tensor:
        """Number of rows of the row's group, [B]."""
        return self.sizes[self.labels]

    def stack(self, values: Tensor) -> Tensor:
        """Return values [J, N, ...] by group from [B, ...].

        An empty slot repeats a row of the batch; exclude it with `present`.
        """
        shape = (*self.present.shape, *values.shape[1:])
        if self.in_order:
            return values.reshape(shape)
        rows = torch.zeros(self.present.numel(), dtype=torch.int64, device=values.device)
        rows[self.row_indices] = torch.arange(values.shape[0], device=values.device)
        return values[rows].reshape(shape)

    def unstack(self, stacked: Tensor) -> Tensor:
        """Return values [B, ...] by row from [J, N, ...], or from [J, 1, ...] if the rows of a group share a value."""
        if stacked.shape[1] != self.present.shape[1]:
            return stacked.squeeze(1)[self.labels]
        flat = stacked.flatten(0, 1)
        return flat if self.in_order else flat[self.row_indices]

    def broadcast_group_sum(self, values: Tensor) -> Tensor:
        """Return the weighted sum of values [B] over each row's group, [B]."""
        values = values if self.weights is None else values * self.weights
        return torch.where(self.present, self.stack(values), 0).sum(1)[self.labels]

    def broadcast_group_mean(self, values: Tensor) -> Tensor:
        """Return the weighted mean of values [B] over each row's group, [B], exact if a group's values are equal."""
        lowest = self.broadcast_group_min(values)
        return lowest + self.broadcast_group_sum(values - lowest) / self.group_weight_by_row

    @property
    def group_weight_by_row(self) -> Tensor:
        """Sum of the weights of the row's group, [B]."""
        return (
            self.group_size_by_row if self.weights is None else self.broadcast_group_sum(torch.ones_like(self.weights))
        )

    @property
    def degrees_of_freedom(self) -> Tensor:
        """Degrees of freedom of the group's variance [B]: members - 1, or, with weights w, sum w - sum w^2 / sum w."""
        return (
            self.group_size_by_row - 1
            if self.weights is None
            else self.group_weight_by_row - self.broadcast_group_sum(self.weights) / self.group_weight_by_row
        )

    def broadcast_group_min(self, values: Tensor) -> Tensor:
        """Return the minimum of values [B] over each row's group, [B]."""
        return torch.where(self.present, self.stack(values), torch.inf).amin(1)[self.labels]
