"""Rollouts with branches: every estimator receives one row per rollout, even if an agent's history branched.

A rollout is one episode, even if its turns have different contexts. Its row contains the model tokens of its sequences
one after the other, so sums and means over a group count every rollout once, and a return is the return of the rollout.
No token occurs in two sequences. The rows of groups without branches are not changed.

:class:`RolloutRowMapping` merges and splits rows. :class:`CompactLayout`, :class:`TokenTrees` and :class:`LeafPaths`
index tokens within a row or along a branch, without loops over rows; :func:`reward_to_go` sums rewards along them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.kernels.arithmetic import cumulative_sum

_SCAN_WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class CompactLayout:
    """Layout with each row's model tokens left-aligned, in order: [B, K], with at most K tokens per row.

    >>> layout = CompactLayout.from_mask(torch.tensor([[True, False, True], [False, True, False]]))
    >>> layout.gather_tokens(torch.tensor([[1., 2., 3.], [4., 5., 6.]])).tolist()
    [[1.0, 3.0], [5.0, 0.0]]
    >>> layout.scatter_to_tokens(torch.tensor([[1., 3.], [5., 9.]])).tolist()
    [[1.0, 0.0, 3.0], [0.0, 5.0, 0.0]]
    """

    mask: Tensor  # [B, T] bool: the positions to keep
    index: Tensor  # [B, T] compact index of every position (the index of the last model token before it; at least 0)
    position: Tensor  # [B, K] original position of each entry; 0 for entries that do not exist
    valid: Tensor  # [B, K] bool: True for entries that exist

    @classmethod
    def from_mask(cls, mask: Tensor) -> CompactLayout:
        """Create the compact layout of a boolean mask [B, T]."""
        rows, width = mask.shape
        count = mask.sum(-1)
        longest = int(count.max()) if count.numel() else 0
        valid = torch.arange(longest, device=mask.device) < count.unsqueeze(-1)
        index = (mask.cumsum(-1) - 1).clamp_(min=0)
        # Positions outside the mask are written to an additional last entry, which is then cut off.
        target = index.masked_fill(~mask, longest)
        source = torch.arange(width, device=mask.device).expand(rows, width)
        position = index.new_zeros(rows, longest + 1).scatter_(-1, target, source)[:, :longest]
        return cls(mask=mask, index=index, position=position, valid=valid)

    def gather_tokens(self, tensor: Tensor) -> Tensor:
        """Gather values [B, T] at model tokens into [B, K]. Missing entries are 0."""
        return tensor.gather(-1, self.position).masked_fill_(~self.valid, 0)

    def returns_weights_and_valid_by_index(self, returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (returns, weights, valid) at every compact index, each [B, K], from values [B, T]."""
        return self.gather_tokens(returns), self.gather_tokens(weights), self.valid

    def scatter_to_tokens(self, tensor: Tensor) -> Tensor:
        """Scatter values [B, K] to their tokens, [B, T]. Other tokens are 0."""
        if not tensor.shape[-1]:
            return tensor.new_zeros(self.mask.shape)
        return tensor.gather(-1, self.index).masked_fill_(~self.mask, 0)


@dataclass(frozen=True)
class TokenTrees:
    """Paths from the root of the conversation to each token, in R rollouts. A rollout is one row [W] of model tokens.

    The sequences of a rollout form trees: a branch begins after a token of another branch. A token on several paths is
    stored once.

    >>> mask = torch.tensor([[True, True, True]])
    >>> paths = TokenTrees(mask, torch.tensor([[-1, 0, 0]]))  # the third token forks after the first
    >>> paths.sum_along_paths(torch.tensor([[1., 2., 4.]])).tolist()
    [[1.0, 3.0, 5.0]]
    >>> paths.token_depths.tolist()
    [[0, 1, 1]]
    """

    mask: Tensor  # [R, W] bool: model tokens
    previous_token: Tensor  # [R, W] int64: index of the previous token on the path; -1: none

    def sum_along_paths(self, values: Tensor) -> Tensor:
        """Sum values [R, W] over the tokens on the path from the root to each token, inclusive.

        Values outside the mask must be 0. Each round doubles the number of tokens in every partial sum.
        """
        back = self.previous_token.masked_fill(~self.mask, -1)
        sums = values.clone()
        while bool((back >= 0).any()):
            position = back.clamp(min=0)
            sums += sums.gather(-1, position).masked_fill_(back < 0, 0)
            back = back.gather(-1, position).masked_fill_(back < 0, -1)
        return sums

    @cached_property
    def token_depths(self) -> Tensor:
        """Number of model tokens before each token on its path from the root, [R, W]; 0 outside the mask."""
        return (self.sum_along_paths(self.mask.long()) - 1).clamp_(min=0)

    @cached_property
    def leaf_paths(self) -> LeafPaths:
        """All root-to-leaf paths."""
        return LeafPaths.from_trees(self)

    def returns_weights_and_valid_by_index(self, returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (returns, weights, valid) of a rollout at every path index, each [R, C], from values [R, W].

        Several tokens with the same index count as one, with the mean of their weights and the weighted mean of their
        returns.
        """
        none = ~self.mask
        count = self._sums(self.mask.to(weights.dtype))
        total = self._sums(weights.masked_fill(none, 0.0))
        lowest = torch.full_like(total, torch.inf)
        lowest.scatter_reduce_(-1, self.token_depths, returns.masked_fill(none, torch.inf), "amin")
        lowest.masked_fill_(count == 0, 0.0)
        above = (returns - self.scatter_to_tokens(lowest)).mul_(weights)  # so that the mean of equal returns is exact
        mean = lowest + self._sums(above.masked_fill_(none, 0.0)) / total.masked_fill(count == 0, 1.0)
        return mean, total / count.clamp(min=1), count > 0

    def scatter_to_tokens(self, columns: Tensor) -> Tensor:
        """Copy the values [R, C] of all depths to their tokens, [R, W]. Other tokens are 0."""
        return columns.gather(-1, self.token_depths).masked_fill_(~self.mask, 0)

    def _sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(values), int(self.token_depths.max()) + 1).scatter_add_(
            -1, self.token_depths, values
        )


@dataclass(frozen=True, kw_only=True)
class LeafPaths:
    """The L root-to-leaf paths of R rollouts, one row per path: [L, D], where D is the length of the longest path.

    >>> ways = TokenTrees(torch.tensor([[True, True, True]]), torch.tensor([[-1, 0, 0]])).leaf_paths
    >>> ways.gather_tokens(torch.tensor([[1., 2., 4.]])).tolist()
    [[1.0, 2.0], [1.0, 4.0]]
    >>> ways.scatter_to_tokens(torch.tensor([[1., 2.], [3., 4.]])).tolist()
    [[2.0, 2.0, 4.0]]
    """

    mask: Tensor  # [R, W] bool: model tokens
    rollout: Tensor  # [L] int64
    position: Tensor  # [L, D] int64: index of each token in its rollout's row
    valid: Tensor  # [L, D] bool: entries that exist, left-aligned

    @classmethod
    def from_trees(cls, paths: TokenTrees) -> LeafPaths:
        """Create the paths in the order of their leaves, by binary lifting: round i moves back 2^i tokens or none."""
        back = paths.previous_token.masked_fill(~paths.mask, -1)
        rows, tokens = (back >= 0).nonzero(as_tuple=True)
        leaves = paths.mask.clone()
        leaves[rows, back[rows, tokens]] = False
        rollout, leaf = leaves.nonzero(as_tuple=True)
        length = paths.token_depths[rollout, leaf].unsqueeze(-1) + 1
        column = torch.arange(int(length.max()), device=back.device)
        steps = (length - 1 - column).clamp_(min=0)  # from the leaf back to the column's token
        position = leaf.unsqueeze(-1).expand_as(steps)
        power = 1
        while power < len(column):
            position = torch.where((steps & power) > 0, back[rollout.unsqueeze(-1), position], position)
            back = back.gather(-1, back.clamp(min=0)).masked_fill_(back < 0, -1)
            power *= 2
        return cls(mask=paths.mask, rollout=rollout, position=position, valid=column < length)

    def gather_tokens(self, tensor: Tensor) -> Tensor:
        """Gather values [R, W] along each path into [L, D]. Missing entries are 0."""
        return tensor[self.rollout.unsqueeze(-1), self.position].masked_fill_(~self.valid, 0)

    def scatter_to_tokens(self, tensor: Tensor) -> Tensor:
        """Average values [L, D] over the paths of each token. Returns [R, W], with 0 outside the mask."""
        rows = self.rollout.unsqueeze(-1).expand_as(self.position)[self.valid]
        sums, counts = tensor.new_zeros(2, *self.mask.shape)
        sums.index_put_((rows, self.position[self.valid]), tensor[self.valid], accumulate=True)
        counts.index_put_((rows, self.position[self.valid]), torch.ones_like(tensor[self.valid]), accumulate=True)
        return sums / counts.clamp_(min=1)


def reward_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """Compute G_k = sum_{j >= k} gamma^(j-k) r_j along the last dimension of compact rewards [B, K].

    Multiplies by powers of gamma inside blocks, and recursively over the sums of blocks. Therefore a long row neither
    overflows nor needs a loop over its tokens.
    """
    if gamma == 1.0:
        return cumulative_sum(rewards.flip(-1)).flip(-1)
    if gamma == 0.0:
        return rewards.clone()
    rows, width = rewards.shape
    size = min(_SCAN_WIDTH, width)
    if width == 0:
        return rewards.clone()
    blocks = -(-width // size)
    padded = torch.nn.functional.pad(rewards, (0, blocks * size - width))
    step = torch.arange(size, device=rewards.device)
    distance = (step.unsqueeze(-1) - step).clamp(min=0)  # j - k at [j, k]
    powers = (gamma ** distance.to(rewards.dtype)).tril()
    inside = padded.view(rows, blocks, size) @ powers  # returns up to the end of each block
    if blocks > 1:
        starts = reward_to_go(inside[..., 0].contiguous(), gamma**size)  # return at the start of every block
        inside[:, :-1] += gamma ** (size - step).to(rewards.dtype) * starts[:, 1:, None]
    return inside.view(rows, -1)[:, :width]


@dataclass(frozen=True, kw_only=True)
class InputsByRollout(AdvantageInputs):
    """Inputs with one row [W] for each of R rollouts."""

    branched: Tensor  # [R] bool: a rollout of the same group has branches
    previous: Tensor  # [R, W] int64 index in the row of the previous token on the path; -1: none


@dataclass(frozen=True, kw_only=True)
class RolloutRowMapping:
    """Mapping of the tokens of B rows to R merged rows of width W, one per rollout."""

    mask: Tensor  # [B, T] the model tokens
    positions: Tensor  # [B, T] index of each model token in its rollout's row
    previous: Tensor  # [B, T] index in the rollout's row of the previous model token on the path; -1: none
    rollout: Tensor  # [B] the rollout of each row
    first: Tensor  # [R] the first row of each rollout
    last: Tensor  # [R] the last row of each rollout
    branched: Tensor  # [R] bool: a rollout of the same group has branches

    @classmethod
    def from_inputs(cls, inputs: AdvantageInputs) -> RolloutRowMapping | None:
        """Create the mapping for inputs with boolean masks. Returns None if every rollout is a single row."""
        samples, branches, mask = inputs.samples, inputs.branches, inputs.response_mask
        if samples is None or branches is None or not bool((branches > 0).any()):
            return None
        order = branches.argsort(stable=True)
        for key in (samples, inputs.groups):
            order = order[key[order].argsort(stable=True)]
        names = torch.stack([inputs.groups[order], samples[order]])
        begins = torch.ones_like(order, dtype=torch.bool)
        begins[1:] = (names[:, 1:] != names[:, :-1]).any(0)
        ends = begins.roll(-1)
        number = begins.cumsum(0) - 1  # index of each row's rollout, in this order
        counts = mask.sum(-1)[order]
        before = counts.cumsum(0) - counts
        rollout, start = torch.empty_like(order), torch.empty_like(order)
        rollout[order], start[order] = number, before - before[begins][number]
        branched = torch.isin(inputs.groups, inputs.groups[branches > 0])
        layout = CompactLayout.from_mask(mask)
        columns = torch.arange(mask.shape[1], device=mask.device)
        positions = torch.where(branched.unsqueeze(-1), start.unsqueeze(-1) + layout.index, columns)
        return cls(
            mask=mask,
            positions=positions,
            previous=_predecessor_indices(inputs, layout, positions, parent_rows(inputs)),
            rollout=rollout,
            first=order[begins],
            last=order[ends],
            branched=branched[order[begins]],
        )

    def merge_rows(self, inputs: AdvantageInputs) -> InputsByRollout:
        """Return the inputs with one row per rollout."""
        given = {name: tensor for name, tensor in vars(inputs).items() if tensor is not None}
        merged = {name: self._merge(tensor) for name, tensor in given.items() if tensor.dim() == 2}
        rows = {"groups": self.first, "greedy_returns": self.first, "bootstrap_values": self.last}
        merged |= {name: given[name][chosen] for name, chosen in rows.items() if name in given}
        if (energy := inputs.trajectory_energy) is not None:
            # This is the energy of the sum of the sequences' gradients if these are orthogonal, which is assumed here.
            merged["trajectory_energy"] = energy.new_zeros(len(self.first)).index_add_(0, self.rollout, energy)
        return InputsByRollout(**merged, branched=self.branched, previous=self._merge(self.previous))

    def split_by_row(self, advantages: Advantages) -> Advantages:
        """Convert results for rollouts [R, W] to results for the rows [B, T]."""
        return Advantages(**{name: self._split(values) for name, values in vars(advantages).items()})

    def _merge(self, tensor: Tensor) -> Tensor:
        positions, mask = self.positions[self.mask], self.mask
        joined = tensor.new_zeros(len(self.first), int(positions.max()) + 1)
        joined[self.rollout.unsqueeze(-1).expand_as(mask)[mask], positions] = tensor[mask]
        return joined

    def _split(self, tensor: Tensor) -> Tensor:
        positions = self.positions.clamp(max=tensor.shape[1] - 1)
        return tensor[self.rollout].gather(-1, positions).masked_fill_(~self.mask, 0.0)


def parent_rows(inputs: AdvantageInputs) -> Tensor:
    """Return the row [B] from which each row forks, or -1."""
    samples, branches, parents, forks = inputs.samples, inputs.branches, inputs.parents, inputs.forks
    if samples is None or branches is None or parents is None or forks is None:
        return torch.full_like(inputs.groups, -1)
    _, rollout = torch.unique(torch.stack([inputs.groups, samples]), dim=1, return_inverse=True)
    spread = int(branches.max()) + 1
    keys = rollout * spread + branches
    order = keys.argsort()
    wanted = rollout * spread + parents
    found = torch.searchsorted(keys[order], wanted).clamp_(max=len(order) - 1)
    forked = (parents >= 0) & (forks > 0) & (keys[order][found] == wanted)
    return torch.where(forked, order[found], -1)


def _predecessor_indices(inputs: AdvantageInputs, layout: CompactLayout, positions: Tensor, parents: Tensor) -> Tensor:
    """Return the index of each model token's predecessor, [B, T].

    The predecessor of a row's first token is the token of the parent row after which the row forks.
    """
    index = layout.index - 1
    source = layout.position.gather(-1, index.clamp(min=0))
    previous = positions.gather(-1, source).masked_fill_(index < 0, -1)
    (rows,) = (parents >= 0).nonzero(as_tuple=True)
    if len(rows) and inputs.forks is not None:
        fork = layout.position[parents[rows], inputs.forks[rows] - 1]
        previous[rows, layout.position[rows, 0]] = positions[parents[rows], fork]
    return previous
