"""Estimators without energies: group means and scales (grpo, rloo, remax, gpg, opo), rules for trees, and gae."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.estimators.baselines import group_baselines
from agentrl.algorithms.estimators.branches import LeafPaths, reward_to_go
from agentrl.algorithms.estimators.forks import sibling_baselines
from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.registry import (
    DiscountedReturnOptions,
    GaeOptions,
    ScalarOptions,
    WeightedBaselineOptions,
    WhitenedAdvantageOptions,
    register_estimator,
)
from agentrl.algorithms.records import Advantages, Groups

_EQUAL = 1e-9  # rewards of a group count as equal if their relative difference is below this (rounding errors)


@register_estimator("grpo", options=ScalarOptions, aggregation="seq_mean_token_mean", group_based=True)
def grpo(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute A = (R - mean) / (std + 1e-6) over the group, with the unbiased std (Shao et al., arXiv 2402.03300).

    A group of one: mean 0 and std 1, so A = R.
    """
    return advantages_from_baselines(
        inputs.totals, group_means(inputs), _standardize_by_group(inputs.totals, inputs.groups)
    )


@register_estimator("tree_grpo", options=ScalarOptions, aggregation="seq_mean_token_mean", group_based=True)
def tree_grpo(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute grpo's A within the tree plus grpo's A within the group (Ji et al., arXiv 2509.21240).

    Each leaf has its own reward and weight, and means use these weights. A tree with one leaf has only the second term,
    so without forks this is `grpo`.
    """
    totals, forest = inputs.totals, inputs.forest
    advantages = _standardize_by_group(totals, inputs.groups)
    if forest is not None:
        trees = Groups.from_ids(forest.edges[:, 0], forest.weights)
        advantages = advantages + torch.where(trees.group_size_by_row == 1, 0.0, _standardize_by_group(totals, trees))
    return advantages_from_baselines(totals, group_means(inputs), advantages)


@register_estimator("treerl", options=ScalarOptions, group_based=True, per_token=True)
def treerl(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute A = ((V - V_root) + (V - V_parent)) / sqrt(L) for each edge (Hou et al., arXiv 2506.11902).

    V is the weighted mean of R over the L leaves below the edge. V_parent is this mean for the parent edge, and V_root
    for the whole group. The parent of a tree's first edge is the group. Without forks, A = 2 (R - mean). A group of
    one: A = R.
    """
    totals, forest, root = inputs.totals, inputs.forest, group_means(inputs)
    if forest is None:
        return advantages_from_baselines(
            totals, root, torch.where(inputs.group_size_by_row == 1, 1.0, 2.0) * (totals - root)
        )
    columns = torch.stack([forest.weights, forest.weights * totals, torch.ones_like(totals)], 1)
    below = torch.stack(
        [level.copy_to_leaves(level.sum_over_leaves(columns)) for level in forest.siblings_by_level], 1
    )  # [L, H, 3]
    weight, moment, leaves = (forest.copy_edges_to_tokens(part) for part in below.unbind(-1))
    values = below[..., 1] / below[..., 0].clamp(min=torch.finfo(totals.dtype).tiny)
    above = forest.copy_edges_to_tokens(torch.cat([root.unsqueeze(-1), values[:, :-1]], 1))
    baselines = (root.unsqueeze(-1) + above) / 2
    advantages = 2 * (moment / weight - baselines) / leaves.sqrt()
    return advantages_from_baselines(totals, baselines, advantages)


def _standardize_by_group(totals: Tensor, groups: Groups) -> Tensor:
    """Compute (R - mean) / (std + 1e-6) over each row's group [B], with the unbiased std; R for a group of one."""
    alone = groups.group_size_by_row == 1
    centred = totals - torch.where(alone, 0.0, groups.broadcast_group_mean(totals))
    spread = (
        groups.broadcast_group_sum(centred.square()) / torch.where(alone, 1.0, groups.degrees_of_freedom)
    ).sqrt() + 1e-6
    return centred / torch.where(alone, 1.0, spread)


@register_estimator("dr_grpo", options=ScalarOptions, aggregation="seq_mean_token_sum_norm", group_based=True)
def dr_grpo(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute A = R - mean of the group (Liu et al., arXiv 2503.20783). A group of one: A = R."""
    return advantages_from_baselines(inputs.totals, group_means(inputs))


@register_estimator("rloo", options=ScalarOptions, group_based=True)
def rloo(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute A = R - mean R of the other rollouts = N / (N - 1) (R - mean) (Ahmadian et al., arXiv 2402.14740).

    A group of one: baseline 0, so A = R. In forked rollouts, the mean for a token is over the leaves not
    below the token.
    """
    totals, members, forest = inputs.totals, inputs.group_size_by_row.double(), inputs.forest
    if forest is not None:
        sums = torch.stack([forest.weights, forest.weights * totals], 1)
        edges = torch.stack(
            [level.copy_to_leaves(level.sum_over_leaves(sums)) for level in forest.siblings_by_level], 1
        )  # [L, H, 2]
        groups = torch.stack([inputs.groups.group_weight_by_row, inputs.groups.broadcast_group_sum(totals)], 1)
        total, moment = (forest.copy_edges_to_tokens(part) for part in (groups.unsqueeze(1) - edges).unbind(-1))
        alone = total < _EQUAL
        baselines = torch.where(alone, 0.0, moment / torch.where(alone, 1.0, total))
        return advantages_from_baselines(totals, baselines, totals.unsqueeze(-1) - baselines)
    advantages = members / (members - 1).clamp(min=1) * (totals - group_means(inputs))
    return advantages_from_baselines(totals, totals - advantages, advantages)


@register_estimator("reinforce_pp_baseline", options=WhitenedAdvantageOptions, group_based=True)
def reinforce_pp_baseline(inputs: EstimatorInputs, options: WhitenedAdvantageOptions) -> Advantages:
    """Compute A = R - mean of the group, whitened over the step by default (`normalize`; Hu, arXiv 2501.03262).

    A group of one: A = R before whitening.
    """
    return advantages_from_baselines(inputs.totals, group_means(inputs))


@register_estimator("remax", options=ScalarOptions, requires=("greedy_returns",))
def remax(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute A = R - R_greedy; R_greedy is the return of one greedy rollout (Li et al., arXiv 2310.10505)."""
    return advantages_from_baselines(inputs.totals, inputs.trajectory_field("greedy_returns"))


@register_estimator("gpg", options=ScalarOptions, span="ranks", group_based=True)
def gpg(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Compute A = c (R - mean), where c compensates for groups with equal rewards (arXiv 2504.02546).

    c = B / B', where B is the number of trajectories in the step, and B' the number in groups with unequal rewards. If
    B' is 0, c is 1. A group of one has equal rewards: A = c R.
    """
    totals = inputs.totals
    lowest, highest = inputs.groups.broadcast_group_min(totals), -inputs.groups.broadcast_group_min(-totals)
    here = highest - lowest > _EQUAL * torch.maximum(highest.abs(), lowest.abs())
    weights = torch.ones_like(totals) if inputs.forest is None else inputs.forest.weights
    counts = torch.stack([weights[here].sum(), weights.sum()])
    differing, trajectories = inputs.communicator.all_gather(counts).sum(0).unbind()
    scale = torch.where(differing > 0, trajectories / differing.clamp(min=1), 1.0)
    means = group_means(inputs)
    return advantages_from_baselines(totals, means, scale * (totals - means))


@register_estimator("opo", options=WeightedBaselineOptions, group_based=True)
def opo(inputs: EstimatorInputs, options: WeightedBaselineOptions) -> Advantages:
    """Compute A = R - b, where b = sum (K + eps) R / sum (K + eps) (Hao et al., arXiv 2505.23585).

    K is the number of model tokens, including rejected tokens. With importance weights or a loss mask, use `ogb` with
    `energy="length"` as the weighted form. A group of one: A = R.
    """
    weights = inputs.lengths.double() + options.epsilon
    return advantages_from_baselines(
        inputs.totals, weighted_group_means(inputs, weights, leave_one_out=options.leave_one_out)
    )


@register_estimator("none", options=ScalarOptions, equal_groups=True)
def zero_advantages(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """Return A = 0: rewards are measured, but do not train the policy. For distillation from a teacher."""
    return advantages_from_baselines(inputs.totals, inputs.totals)


def group_means(inputs: EstimatorInputs) -> Tensor:
    """Return the mean R of the row's group [B]; 0 for a group of one."""
    return torch.where(inputs.group_size_by_row == 1, 0.0, inputs.groups.broadcast_group_mean(inputs.totals))


def weighted_group_means(
    inputs: EstimatorInputs, weights: Tensor, *, leave_one_out: bool, siblings: str = "none", pool: float = 0.0
) -> Tensor:
    """Compute sum W R / sum W over the row's group for positive weights [B]; 0 for a group of one.

    Returns [B], or [B, T] where tokens of forked rollouts have different siblings.
    """
    groups, forest = inputs.groups, inputs.forest
    leave_one_out = leave_one_out or siblings != "none"
    if forest is not None and leave_one_out:
        totals = inputs.totals.unsqueeze(-1)
        valid = torch.ones_like(totals, dtype=torch.bool)
        return sibling_baselines(
            forest, totals, weights.unsqueeze(-1), valid, siblings=siblings, pool=pool, tail="zero"
        )
    if forest is not None:
        weights = weights * forest.weights
    # No row is alone in its column if its group has two or more rows, so the tail rule has no effect.
    return group_baselines(
        groups, inputs.totals.unsqueeze(-1), weights.unsqueeze(-1), tail="zero", leave_one_out=leave_one_out
    ).squeeze(-1)


def advantages_from_baselines(totals: Tensor, baselines: Tensor, advantages: Tensor | None = None) -> Advantages:
    """Return Advantages from totals [B] and baselines [B] or [B, T]; advantages default to totals - baselines."""
    totals = totals.unsqueeze(-1)
    baselines = baselines.unsqueeze(-1) if baselines.dim() == 1 else baselines
    if advantages is None:
        advantages = totals - baselines
    elif advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)
    return Advantages(advantages=advantages, returns=totals, baselines=baselines)


@register_estimator("reinforce_pp", options=DiscountedReturnOptions, per_token=True)
def reinforce_pp(inputs: EstimatorInputs, options: DiscountedReturnOptions) -> Advantages:
    """Compute A_k = G_k, whitened over the step by default (`normalize`; Hu, arXiv 2501.03262)."""
    returns = inputs.returns(options.gamma)
    return Advantages(advantages=returns, returns=returns, baselines=torch.zeros_like(returns))


@register_estimator("gae", options=GaeOptions, requires=("values",), per_token=True)
def gae(inputs: EstimatorInputs, options: GaeOptions) -> Advantages:
    """Compute A_k = delta_k + gamma lam A_{k+1}, delta_k = r_k + gamma V_{k+1} - V_k (arXiv 1506.02438).

    k + 1 is the next model token, even if an observation lies between. V after the last token is the row's
    `bootstrap_values`: 0 if the episode ended, the critic's value of the next token if it was truncated. The returns,
    the critic's targets, are A + V. A is whitened afterwards by default (`normalize`).

    In branched rollouts, every path from the root to a leaf is treated as a row, with the rollout's `bootstrap_values`
    at its end. A token on several paths has the mean of its advantages.
    """
    layout, rewards = inputs.layout_and_rewards
    values = layout.gather_tokens(inputs.token_field("values"))  # [B, K]
    following = torch.zeros_like(values)
    following[:, :-1] = values[:, 1:]
    if inputs.source.bootstrap_values is not None:
        after = inputs.trajectory_field("bootstrap_values")
        after = after[layout.rollout] if isinstance(layout, LeafPaths) else after
        following.scatter_(-1, layout.valid.sum(-1, keepdim=True) - 1, after.unsqueeze(-1))
    errors = rewards + options.gamma * following - values
    advantages = reward_to_go(errors, options.gamma * options.lam)
    return Advantages(
        advantages=layout.scatter_to_tokens(advantages),
        returns=layout.scatter_to_tokens(advantages + values),
        baselines=layout.scatter_to_tokens(values),
    )
