"""Inputs of estimators: checked AdvantageInputs for a block of rows, with derived quantities."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from agentrl.algorithms.estimators.branches import CompactLayout, InputsByRollout, LeafPaths, TokenTrees, reward_to_go
from agentrl.algorithms.estimators.forks import InputsByLeaf, RolloutForest
from agentrl.algorithms.options import InvalidInputError, MissingInputError, check_finite, check_not_negative
from agentrl.algorithms.records import (
    LOCAL_COMMUNICATOR,
    AdvantageInputs,
    Communicator,
    Groups,
    check_rewards_on_mask,
    check_rows_have_tokens,
)
from agentrl.kernels.arithmetic import cumulative_sum

# Maximum number of float64 elements in a block [b, T]. A block fits into a CPU's cache. On other devices, the maximum
# limits memory.
_BLOCK_ELEMENTS = {"cpu": 1 << 18}
_OTHER_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class EstimatorInputs:
    """Rows of a batch that contain whole groups. Derived tensors are float64, NaN-free and 0 outside model tokens."""

    source: AdvantageInputs  # unchecked
    groups: Groups
    rows: Tensor  # [B] row indices for messages
    communicator: Communicator = LOCAL_COMMUNICATOR  # access to the step's other groups
    weighted: bool = (
        True  # False: the estimator does not depend on `masked_importance_weights`, which may not be known yet
    )

    @classmethod
    def from_inputs(
        cls,
        inputs: AdvantageInputs,
        row_numbers: Tensor | None = None,
        communicator: Communicator = LOCAL_COMMUNICATOR,
        *,
        weighted: bool = True,
    ) -> "EstimatorInputs":
        """Wrap inputs with boolean masks that passed `check_shapes`. Raises InvalidInputError for invalid values."""
        if row_numbers is None:
            row_numbers = torch.arange(inputs.groups.numel(), device=inputs.groups.device)
        check_rows_have_tokens(inputs.response_mask, row_numbers)
        check_rewards_on_mask(inputs.rewards, inputs.response_mask, row_numbers)
        weights = inputs.leaf_weights if isinstance(inputs, InputsByLeaf) and inputs.is_forked else None
        return cls(
            source=inputs,
            groups=Groups.from_ids(inputs.groups, weights),
            rows=row_numbers,
            communicator=communicator,
            weighted=weighted,
        )

    @property
    def mask(self) -> Tensor:
        """Response mask [B, T], True on model tokens."""
        return self.source.response_mask

    @property
    def group_size_by_row(self) -> Tensor:
        """Number of trajectories in the row's group, [B]."""
        return self.groups.group_size_by_row

    @cached_property
    def lengths(self) -> Tensor:
        """K: number of model tokens in each row, [B]."""
        return self.mask.sum(-1)

    @cached_property
    def rewards(self) -> Tensor:
        """Rewards r, [B, T]."""
        return self.token_field("rewards")

    @cached_property
    def totals(self) -> Tensor:
        """R: sum of each row's rewards, [B]. Summed sequentially, so that padding does not affect the rounding."""
        rows, width = self.mask.shape
        step = max(1, _block_elements(self.mask.device) // max(1, width))
        parts = [slice(start, start + step) for start in range(0, max(1, rows), step)]
        return torch.cat([cumulative_sum(self._token_field("rewards", part))[:, -1] for part in parts])

    @cached_property
    def layout(self) -> CompactLayout:
        """Positions of the model tokens."""
        return CompactLayout.from_mask(self.mask)

    @cached_property
    def token_trees(self) -> TokenTrees | None:
        """The paths from the roots of branched rollouts to their tokens; None if no rollout has branches."""
        source = self.source
        if not isinstance(source, InputsByRollout) or not bool(source.branched.any()):
            return None
        return TokenTrees(self.mask, source.previous)

    @cached_property
    def forest(self) -> RolloutForest | None:
        """The trees of forked rollouts, whose leaves are the rows; None if no rollout is forked."""
        source = self.source
        if not isinstance(source, InputsByLeaf) or not source.is_forked:
            return None
        return RolloutForest(source.leaf_weights, source.edges, source.levels, self.groups.labels)

    @cached_property
    def mean_lengths_by_tree(self) -> Tensor:
        """Model tokens of each row, [B]; in forked rollouts, the weighted mean over the leaves of the row's tree."""
        if self.forest is None:
            return self.lengths
        tree = self.forest.siblings_by_level[0]
        weights = self.forest.weights.unsqueeze(-1)
        total, moment = tree.sum_over_leaves(weights), tree.sum_over_leaves(weights * self.lengths.unsqueeze(-1))
        return tree.copy_to_leaves(moment / total).squeeze(-1)

    @property
    def masked_importance_weights(self) -> Tensor | None:
        """rho * loss_mask, [B, T], or None if all values are 1. Only available to estimators registered as weighted."""
        if not self.weighted:
            raise MissingInputError("this estimator reads masked_importance_weights: register it with weighted=True")
        return self._masked_importance_weights

    def check_importance_weights(self) -> None:
        """Raise InvalidInputError if an importance weight is negative or not finite."""
        _ = self._masked_importance_weights

    @cached_property
    def _masked_importance_weights(self) -> Tensor | None:
        ratio = None
        if self.source.importance_weights is not None:
            ratio = self.token_field("importance_weights", allow_negative=False)
        if self.source.loss_mask is None:
            return ratio
        counted = self.mask & self.source.loss_mask
        return counted.double() if ratio is None else ratio.masked_fill_(~counted, 0.0)

    def returns(self, gamma: float) -> Tensor:
        """Compute G on every model token, [B, T]: the reward-to-go, discounted by model tokens.

        In branched rollouts, G is computed on every path from the root to a leaf, as laid out by `layout_and_rewards`.
        A token on several paths has the mean over these paths. Without a discount, G is the sum of all rewards except
        those before the token.
        """
        if gamma == 1.0 and self.token_trees is not None:
            before = self.token_trees.sum_along_paths(self.rewards) - self.rewards
            return (self.totals.unsqueeze(-1) - before).masked_fill_(~self.mask, 0.0)
        if gamma == 1.0:
            return reward_to_go(self.rewards, 1.0).masked_fill_(~self.mask, 0.0)
        layout, rewards = self.layout_and_rewards
        return layout.scatter_to_tokens(reward_to_go(rewards, gamma))

    @cached_property
    def layout_and_rewards(self) -> tuple[CompactLayout | LeafPaths, Tensor]:
        """Layout of the model tokens as sequences, and their rewards: [B, K], or [L, D] with branches.

        A row is a trajectory. In branched rollouts, it is a path from the root to a leaf. The last reward of a path
        includes the rollout's rewards off this path.
        """
        if self.token_trees is None:
            return self.layout, self.layout.gather_tokens(self.rewards)
        ways = self.token_trees.leaf_paths
        rewards = ways.gather_tokens(self.rewards)
        elsewhere = self.totals[ways.rollout] - rewards.sum(-1)
        return ways, rewards.scatter_add_(-1, ways.valid.sum(-1, keepdim=True) - 1, elsewhere.unsqueeze(-1))

    def token_field(self, name: str, *, allow_negative: bool = True) -> Tensor:
        """Return the input field `name` [B, T] in float64, with 0 outside the mask.

        Raises InvalidInputError for a non-finite value at a model token, or a negative one unless ``allow_negative``.
        """
        values = self._token_field(name, slice(None))
        if not allow_negative and values.numel() and float(values.min()) < 0:
            check_not_negative(name, values, self.mask, self.rows)
        return values

    def _token_field(self, name: str, rows: slice) -> Tensor:
        tensor, mask = self._required_field(name)[rows].detach(), self.mask[rows]
        values = tensor.to(torch.float64, copy=True).masked_fill_(~mask, 0.0)
        if not bool(torch.isfinite(values.sum())):  # a sum may overflow, so check each number
            check_finite(name, tensor, mask, self.rows[rows])
        return values

    def trajectory_field(self, name: str, *, allow_negative: bool = True) -> Tensor:
        """Return the input field `name` [B] in float64.

        Raises InvalidInputError for a non-finite value, or a negative one unless ``allow_negative``.
        """
        values = self._required_field(name).detach().double()
        bad = ~torch.isfinite(values) if allow_negative else ~(torch.isfinite(values) & (values >= 0))
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            reason = "it must be finite" if allow_negative else "it must be finite and not negative"
            raise InvalidInputError(f"{name} is {float(values[row])} in row {int(self.rows[row])}; {reason}")
        return values

    def _required_field(self, name: str) -> Tensor:
        tensor: Tensor | None = getattr(self.source, name)
        if tensor is None:
            raise MissingInputError(f"this estimator needs {name}")
        return tensor


def select_rows(inputs: AdvantageInputs, rows: Tensor) -> AdvantageInputs:
    """Return the inputs restricted to `rows`."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: tensor[rows] for name, tensor in given.items() if tensor is not None})


def blocks_of_whole_groups(inputs: AdvantageInputs) -> Iterator[Tensor]:
    """Yield row indices in blocks of whole groups.

    Groups with branched or forked rollouts are in separate blocks, so that they change no value of other groups.
    """
    width = inputs.rewards.shape[1]
    if isinstance(inputs, InputsByRollout):
        apart = inputs.branched
    elif isinstance(inputs, InputsByLeaf):
        apart = torch.isin(inputs.groups, inputs.groups[inputs.leaf_weights < 1])
    else:
        yield from blocks_of_equally_sized_groups(inputs.groups, width)
        return
    for kind in (~apart, apart):
        (rows,) = kind.nonzero(as_tuple=True)
        yield from (rows[block] for block in blocks_of_equally_sized_groups(inputs.groups[rows], width))


def blocks_of_equally_sized_groups(group_ids: Tensor, row_length: int) -> Iterator[Tensor]:
    """Yield row indices in non-empty blocks of whole groups of one size. The rows of a group are contiguous.

    A block contains as many groups as fit into a cache, at least one. Passes over a block are therefore cheap, and no
    intermediate result has the size of the batch.
    """
    groups = Groups.from_ids(group_ids)
    limit = _block_elements(group_ids.device)
    order = (groups.group_size_by_row * groups.sizes.numel() + groups.labels).argsort(stable=True)
    for size in groups.sizes.unique().tolist():
        rows = order[groups.group_size_by_row[order] == size]
        together = max(1, limit // max(1, size * row_length))
        yield from rows.split(size * together)


def _block_elements(device: torch.device) -> int:
    return _BLOCK_ELEMENTS.get(device.type, _OTHER_BLOCK_ELEMENTS)
