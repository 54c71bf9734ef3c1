"""Forked rollouts: trees whose leaves are alternative continuations of a common history.

A rollout that forks after a turn continues as several branches. Its rows are the *edges* of a tree: the model tokens
from the root to a fork, between two forks, or from a fork to a leaf. Every path from the root to a leaf is a possible
rollout with a separate return. The weight of a leaf is the product of 1 / children over the forks above it, and the
weight of an edge is the sum of the weights of its leaves (docs/reference/formulas.md 10).

Estimators receive one row per leaf, with its weight. Therefore, a mean over rows estimates the mean over rollouts for
trees of any shape. A token of an edge receives the weighted mean of its advantages over the leaves below it.

:class:`LeafRowMapping` maps edges to leaves and back. :class:`RolloutForest` computes sums over the siblings of a
branch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from agentrl.algorithms.estimators.branches import CompactLayout, parent_rows
from agentrl.algorithms.records import AdvantageInputs, Advantages, Groups
from agentrl.kernels.arithmetic import cumulative_sum


@dataclass(frozen=True, kw_only=True)
class InputsByLeaf(AdvantageInputs):
    """Inputs [L, D] with one row per leaf: the model tokens on its path, without observations.

    D is the number of model tokens on the longest path.

    The level of an edge is the number of forks above it. An edge that is the only child of its parent counts as a part
    of its parent.
    """

    leaf_weights: Tensor  # [L] float64, weight of the leaf in its tree
    edges: Tensor  # [L, H] int64, edge of the leaf's path at each level, unique in the batch; -1: none
    levels: Tensor  # [L, D] int64, level of each token's edge; -1: no token

    @property
    def is_forked(self) -> bool:
        """True if a rollout has several leaves."""
        return bool((self.leaf_weights < 1).any())


@dataclass(frozen=True, kw_only=True)
class LeafRowMapping:
    """Mapping of the tokens of B rows (edges) to L rows (leaves).

    A tree with a root of one token and a fork into branches of one and two tokens:

    >>> inputs = AdvantageInputs(
    ...     rewards=torch.tensor([[0., 0.], [1., 0.], [0., 0.]]),
    ...     response_mask=torch.tensor([[1, 0], [1, 0], [1, 1]]).bool(),
    ...     groups=torch.tensor([7, 7, 7]),
    ...     samples=torch.tensor([0, 0, 0]),
    ...     branches=torch.tensor([0, 1, 2]),
    ...     parents=torch.tensor([-1, 0, 0]),
    ...     forks=torch.tensor([0, 1, 1]),
    ...     path_weights=torch.tensor([1., .5, .5]),
    ... )
    >>> rows = LeafRowMapping.from_inputs(inputs)
    >>> rows.merge_rows(inputs).rewards.tolist(), rows.merge_rows(inputs).levels.tolist()
    ([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [[0, 1, -1], [0, 1, 1]])
    """

    layout: CompactLayout  # layout of the B rows; K is its width
    tokens: Tensor  # [L, D] row * K + compact index of each token of a leaf's path
    valid: Tensor  # [L, D] bool, entries that exist
    leaf: Tensor  # [L] row of each leaf
    ancestors: Tensor  # [L, A] rows from the root to the leaf; -1: none
    weights: Tensor  # [L] float64, as `InputsByLeaf.leaf_weights`
    edges: Tensor  # [L, H] as in `InputsByLeaf`
    levels: Tensor  # [L, D] as in `InputsByLeaf`

    @classmethod
    def from_inputs(cls, inputs: AdvantageInputs) -> LeafRowMapping | None:
        """Create the mapping for inputs with boolean masks. Returns None if no rollout is forked."""
        weights = inputs.path_weights
        if weights is None or not bool((weights < 1).any()):
            return None
        parents = parent_rows(inputs)
        children = torch.bincount(parents[parents >= 0], minlength=len(parents))
        (leaf,) = (children == 0).nonzero(as_tuple=True)
        upward = [leaf]
        while bool((upward[-1] >= 0).any()):
            upward.append(parents[upward[-1]].masked_fill(upward[-1] < 0, -1))
        ancestors = torch.stack(upward[-2::-1], 1)  # root first, right-aligned; the next line left-aligns
        ancestors = ancestors.gather(1, (ancestors < 0).to(torch.int8).argsort(dim=1, stable=True))
        layout = CompactLayout.from_mask(inputs.response_mask)
        width = layout.valid.shape[1]
        counts = layout.valid.sum(-1)[ancestors].masked_fill(ancestors < 0, 0)  # [L, A]
        begins = counts.cumsum(1) - counts
        # An edge starts a level unless it is the only child of its parent.
        starts = (children[parents.clamp(min=0)] > 1)[ancestors] | (parents[ancestors] < 0)
        level = starts.masked_fill(ancestors < 0, False).cumsum(1) - 1
        longest, column = int(counts.sum(1).max()), torch.arange(width, device=leaf.device)
        tokens = leaf.new_zeros(len(leaf), longest + 1)  # the last column collects missing entries and is cut off below
        levels = torch.zeros_like(tokens)
        edges = leaf.new_full((len(leaf), int(level.max()) + 2), -1)
        for place, edge in enumerate(ancestors.unbind(1)):
            exists = column < counts[:, place, None]
            target = torch.where(exists, begins[:, place, None] + column, longest)
            tokens.scatter_(1, target, edge[:, None] * width + column)
            levels.scatter_(1, target, level[:, place, None].expand_as(target))
            first = starts[:, place] & (edge >= 0)
            edges.scatter_(1, torch.where(first, level[:, place], edges.shape[1] - 1)[:, None], edge[:, None])
        valid = torch.arange(longest, device=leaf.device) < counts.sum(1, keepdim=True)
        return cls(
            layout=layout,
            tokens=tokens[:, :longest].masked_fill(~valid, 0),
            valid=valid,
            leaf=leaf,
            ancestors=ancestors,
            weights=weights[leaf].double(),
            edges=edges[:, :-1],
            levels=levels[:, :longest].masked_fill(~valid, -1),
        )

    def merge_rows(self, inputs: AdvantageInputs) -> InputsByLeaf:
        """Return the inputs with one row per leaf."""
        given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        rows = {name: tensor[self.leaf] for name, tensor in given.items() if tensor is not None and tensor.dim() == 1}
        tokens = {
            name: self._gather_along_paths(tensor)
            for name, tensor in given.items()
            if tensor is not None and tensor.dim() == 2
        }
        ungrouped = dict.fromkeys(("samples", "branches", "parents", "forks", "path_weights"))
        leaves = InputsByLeaf(
            **{**given, **rows, **tokens, **ungrouped},
            leaf_weights=self.weights,
            edges=self.edges,
            levels=self.levels,
        )
        if inputs.trajectory_energy is None:
            return leaves
        # This is the energy of the sum of the edges' gradients if these are orthogonal, which is assumed here.
        energy = inputs.trajectory_energy[self.ancestors].masked_fill(self.ancestors < 0, 0.0).sum(1)
        return replace(leaves, trajectory_energy=energy)

    def split_by_row(self, advantages: Advantages) -> Advantages:
        """Convert results for leaves [L, D] to results for edges [B, T]: the weighted mean of each token's leaves."""
        return Advantages(**{name: self._mean_over_leaves(values) for name, values in vars(advantages).items()})

    def _gather_along_paths(self, tensor: Tensor) -> Tensor:
        return self.layout.gather_tokens(tensor).flatten()[self.tokens].masked_fill_(~self.valid, 0)

    def _mean_over_leaves(self, values: Tensor) -> Tensor:
        places, width = self.tokens[self.valid], self.layout.valid.shape
        weights = self.weights.unsqueeze(-1).expand_as(self.tokens)[self.valid]
        total, moment = weights.new_zeros(2, self.layout.valid.numel())
        total.index_add_(0, places, weights)
        moment.index_add_(0, places, weights * values[self.valid].double())
        return self.layout.scatter_to_tokens((moment / total.masked_fill_(total == 0, 1.0)).view(width)).to(
            values.dtype
        )


@dataclass(frozen=True)
class RolloutForest:
    """The trees of L leaf rows. A plain rollout is a tree with one leaf. The prompt is the fork above the trees."""

    weights: Tensor  # [L] float64
    edges: Tensor  # [L, H] int64, -1: none
    levels: Tensor  # [L, D] int64
    groups: Tensor  # [L] int64, the group of each leaf

    @cached_property
    def siblings_by_level(self) -> list[Siblings]:
        """The siblings at each level; at level 0, the trees of each group."""
        above = [self.groups, *self.edges.unbind(1)]
        return [Siblings.group_by_parent(edge, parent) for edge, parent in zip(above[1:], above, strict=False)]

    def copy_edges_to_tokens(self, edge_values: Tensor) -> Tensor:
        """Copy the values [L, H] of each path's edges to the tokens of these edges, [L, D]."""
        return edge_values.gather(1, self.levels.clamp(min=0))


@dataclass(frozen=True)
class Siblings:
    """The E edges of one level, grouped by their forks."""

    rows: Tensor  # [l] leaf rows below these edges
    edge: Tensor  # [l] edge of each leaf row, numbered 0 .. E-1
    groups: Groups  # the edges, grouped by their forks
    leaves: int  # L

    @classmethod
    def group_by_parent(cls, edges: Tensor, parents: Tensor) -> Siblings:
        """Group edges [L] by parents [L]. Leaves with edge -1 have no edge at this level."""
        (rows,) = (edges >= 0).nonzero(as_tuple=True)
        names, edge = torch.unique(edges[rows], return_inverse=True)
        forks = names.new_empty(len(names)).scatter_(0, edge, parents[rows])
        return cls(rows, edge, Groups.from_ids(forks), len(edges))

    def sum_over_leaves(self, leaf_values: Tensor) -> Tensor:
        """Sum values [L, C] over the leaves of each edge, [E, C]."""
        sums = leaf_values.new_zeros(len(self.groups.labels), leaf_values.shape[1])
        return sums.index_add_(0, self.edge, leaf_values[self.rows])

    def sum_over_siblings(self, edge_values: Tensor) -> Tensor:
        """Sum values [E, C] over the siblings of each leaf's edge. Returns [L, C].

        The sum is 0 for leaves that have no edge at this level.
        """
        stacked = self.groups.stack(edge_values).masked_fill(~self.groups.present.unsqueeze(-1), 0.0)
        siblings = self.groups.unstack(sum_excluding_self(stacked.transpose(1, 2)).transpose(1, 2))
        return self.copy_to_leaves(siblings)

    def copy_to_leaves(self, edge_values: Tensor) -> Tensor:
        """Copy values [E, C] of edges to their leaves, [L, C]."""
        zeros = edge_values.new_zeros(self.leaves, edge_values.shape[1])
        return zeros.index_copy_(0, self.rows, edge_values[self.edge])


SIBLINGS = ("none", "only", "pooled")


def sibling_baselines(
    forest: RolloutForest, returns: Tensor, weights: Tensor, valid: Tensor, *, siblings: str, pool: float, tail: str
) -> Tensor:
    """Compute b = sum W G / sum W over each token's siblings, at the token's index. Returns [L, D].

    ``returns`` G, ``weights`` W + eps and ``valid`` are [L, C] at compact indices, with C = D, or C = 1 for one value
    per leaf. The siblings of a token are the leaves of the other children of its nearest fork. Above the first fork,
    these are the other trees of the group. With ``siblings="none"``, they are the other trees for every token, and with
    ``"pooled"`` the baseline is (n b_siblings + pool b_trees) / (n + pool), where n siblings contribute.

    A leaf that ended before the index contributes nothing, or with ``tail="carry"`` its last value. Where no sibling
    contributes, b is 0, or with ``tail="self"`` the token's G.
    """
    own = returns
    if tail == "carry":
        last = (valid.sum(1, keepdim=True) - 1).clamp(min=0)
        index = torch.minimum(torch.arange(valid.shape[1], device=valid.device).expand_as(valid), last)
        returns, weights, valid = returns.gather(1, index), weights.gather(1, index), torch.ones_like(valid)
    # Sum returns relative to the lowest return, so that the mean of equal returns is exact.
    lowest = (
        Groups.from_ids(forest.groups).broadcast_group_min(returns.masked_fill(~valid, torch.inf).amin(1)).unsqueeze(1)
    )
    weights = (weights * forest.weights.unsqueeze(1)).masked_fill(~valid, 0.0)
    moments = weights * (returns - lowest).masked_fill(~valid, 0.0)

    def baselines_and_counts(level: Siblings) -> tuple[Tensor, Tensor]:
        """Return the baselines of a level's tokens and the number of siblings that contribute to each."""
        totals = level.sum_over_leaves(weights)
        total, number = level.sum_over_siblings(totals), level.sum_over_siblings((totals > 0).double())
        mean = lowest + level.sum_over_siblings(level.sum_over_leaves(moments)) / torch.where(number > 0, total, 1.0)
        return torch.where(number > 0, mean, own if tail == "self" else 0.0), number

    trees, others = baselines_and_counts(forest.siblings_by_level[0])
    baselines = trees.expand(forest.levels.shape)
    if siblings == "none":
        return baselines
    for number, level in enumerate(forest.siblings_by_level[1:], 1):
        mean, count = baselines_and_counts(level)
        if siblings == "pooled":
            prior = torch.where(others > 0, pool, 0.0)
            pooled = (count * mean + prior * trees) / (count + prior).masked_fill(count + prior == 0, 1.0)
            mean = torch.where(count + prior > 0, pooled, mean)
        baselines = torch.where(forest.levels == number, mean, baselines)
    return baselines


def sum_excluding_self(terms: Tensor) -> Tensor:
    """Sum all other entries along the last dimension. Subtraction from a total would lose small entries."""
    return _exclusive_sums(terms) + _exclusive_sums(terms.flip(-1)).flip(-1)


def _exclusive_sums(terms: Tensor) -> Tensor:
    sums = torch.zeros_like(terms)
    sums[..., 1:] = cumulative_sum(terms[..., :-1])
    return sums
