"""Optimal baselines: energy-weighted means over the group, per trajectory (`ogb`, `eob`) or per token (`otb`).

Every weight is an energy W plus eps times the energy's scale, so the mean is exact for equal returns and equals the
plain mean if energies vanish. sum (W + eps) A = 0 over all entries that share a baseline
(docs/reference/formulas.md 4).

`ogb_pooled` uses the step's other groups as a prior. The optimal baseline is a ratio of expectations, E[W R] / E[W].
A small group estimates both expectations badly: if an outcome is rare, often no trajectory of the group has it. Each
expectation is therefore shrunk towards its mean over all other groups of the step, as if the group had `pool` more
trajectories.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from agentrl.algorithms.estimators.baselines import group_baselines, importance_weighted_energy
from agentrl.algorithms.estimators.classic import advantages_from_baselines, weighted_group_means
from agentrl.algorithms.estimators.forks import sibling_baselines, sum_excluding_self
from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.registry import (
    ColumnBaselineOptions,
    ExactEnergyOptions,
    GlobalBaselineOptions,
    PooledBaselineOptions,
    ProxyEnergyOptions,
    TokenBaselineOptions,
    register_estimator,
)
from agentrl.algorithms.records import Advantages
from agentrl.kernels.arithmetic import cumulative_sum

# An optimal token baseline weights all tokens equally, so the loss must do the same.
_token_baseline = partial(register_estimator, weighted=True, aggregation="token_mean", per_token=True, group_based=True)


@register_estimator("ogb", options=GlobalBaselineOptions, weighted=True, group_based=True)
def optimal_global_baseline(inputs: EstimatorInputs, options: GlobalBaselineOptions) -> Advantages:
    """Compute A = R - b, b = sum (W_K + eps) R / sum (W_K + eps), W_K = sum_j (rho_j loss_mask_j)^2 w_j.

    The Optimal Global Baseline with the proxy energy (arXiv 2602.07078, Eq. 21). A group of one: A = R.
    """
    return _advantages_by_total_energy(inputs, importance_weighted_energy(inputs, options.energy), options)


@register_estimator("eob", options=ExactEnergyOptions, weighted=True, requires=("trajectory_energy",), group_based=True)
def exact_optimal_baseline(inputs: EstimatorInputs, options: ExactEnergyOptions) -> Advantages:
    """Compute A = R - b, b = sum (E + eps) R / sum (E + eps), E = ||sum_t rho_t grad log p_t||^2.

    The optimal constant baseline (Greensmith et al., JMLR 5, 2004). E is the exact `trajectory_energy`. It has no fixed
    unit, so eps is multiplied by the group's mean energy. This mean includes the trajectory itself, so `leave_one_out`
    leaves a bias of order eps. A group of one: A = R.
    """
    energy = inputs.trajectory_field("trajectory_energy", allow_negative=False)
    weights = _add_epsilon(inputs, energy.unsqueeze(-1), inputs.groups.broadcast_group_mean(energy), options).squeeze(
        -1
    )
    return _trajectory_advantages(inputs, weights, options)


@_token_baseline("otb", options=ColumnBaselineOptions, by_column=True)
def optimal_column_baseline(inputs: EstimatorInputs, options: ColumnBaselineOptions) -> Advantages:
    """Compute A_t = G_t - b_t, b_t = sum (W_t + eps) G_t / sum (W_t + eps) over the group's tokens in *column* t.

    The Optimal Token Baseline (arXiv 2602.07078, Theorem 4.1) for left-aligned answers without observations. With
    observations, a column mixes model tokens of some trajectories with gaps of others, so use `tir_otb`. The branches
    of a rollout have no common columns: groups with a branched rollout use the baseline of `ogb`.
    """
    if inputs.token_trees is not None:
        return _advantages_by_total_energy(inputs, importance_weighted_energy(inputs, options.energy), options)
    returns = inputs.returns(options.gamma)
    energies = cumulative_sum(importance_weighted_energy(inputs, options.energy))
    weights = baseline_weights(inputs, energies, options)
    baselines = group_baselines(
        inputs.groups, returns, weights, inputs.mask, tail=options.tail, leave_one_out=options.leave_one_out
    )
    return Advantages(advantages=returns - baselines, returns=returns, baselines=baselines)


@_token_baseline("tir_otb", options=TokenBaselineOptions)
def optimal_token_baseline(inputs: EstimatorInputs, options: TokenBaselineOptions) -> Advantages:
    """Compute A_k = G_k - b_k, b_k = sum (W_k + eps) G_k / sum (W_k + eps) over trajectories of the group with K > k.

    The Optimal Token Baseline (arXiv 2602.07078) for tool-integrated reasoning: k counts model tokens only, without
    observations. Equals `otb` on contiguous, left-aligned masks. In branched rollouts, k and W_k
    are counted from the root of the conversation, and tokens of a rollout with the same k count as one, with the mean
    of their W_k.
    """
    energies = importance_weighted_energy(inputs, options.energy)
    sums = cumulative_sum(energies) if inputs.token_trees is None else inputs.token_trees.sum_along_paths(energies)
    return _token_advantages(inputs, sums, options)


@_token_baseline("otb_isolated", options=TokenBaselineOptions)
def optimal_token_baseline_own_energy(inputs: EstimatorInputs, options: TokenBaselineOptions) -> Advantages:
    """Compute `tir_otb` with the token's own energy (rho_k loss_mask_k)^2 w_k (arXiv 2602.07078, Eq. 52)."""
    return _token_advantages(inputs, importance_weighted_energy(inputs, options.energy), options)


@_token_baseline("otb_total", options=TokenBaselineOptions)
def optimal_token_baseline_total_energy(inputs: EstimatorInputs, options: TokenBaselineOptions) -> Advantages:
    """Compute `tir_otb` with the trajectory's total energy W_K at every k: acausal (arXiv 2602.07078, Eq. 34)."""
    energies = importance_weighted_energy(inputs, options.energy).sum(-1, keepdim=True)
    return _token_advantages(inputs, energies.expand(inputs.mask.shape), options)


def _advantages_by_total_energy(inputs: EstimatorInputs, energies: Tensor, options: ProxyEnergyOptions) -> Advantages:
    """Compute R - b, where b is weighted by each rollout's sum of the energies [B, T]."""
    return _trajectory_advantages(
        inputs, baseline_weights(inputs, energies.sum(-1, keepdim=True), options).squeeze(-1), options
    )


def _trajectory_advantages(
    inputs: EstimatorInputs,
    weights: Tensor,
    options: ProxyEnergyOptions | ExactEnergyOptions,
) -> Advantages:
    # `otb` uses this baseline for branched rollouts, but it has no options for siblings.
    siblings, pool = getattr(options, "siblings", "none"), getattr(options, "sibling_pool", 0.0)
    means = weighted_group_means(inputs, weights, leave_one_out=options.leave_one_out, siblings=siblings, pool=pool)
    return advantages_from_baselines(inputs.totals, means)


def _token_advantages(inputs: EstimatorInputs, energies: Tensor, options: TokenBaselineOptions) -> Advantages:
    """Compute G_k - b_k from the energies [B, T] of model tokens, with one baseline per compact index."""
    returns, weights = inputs.returns(options.gamma), baseline_weights(inputs, energies, options)
    leave_one_out = options.leave_one_out or options.siblings != "none"
    if inputs.forest is not None and leave_one_out:
        columns = inputs.layout.returns_weights_and_valid_by_index(returns, weights)
        forest = replace(inputs.forest, levels=inputs.layout.gather_tokens(inputs.forest.levels))
        made = sibling_baselines(
            forest, *columns, siblings=options.siblings, pool=options.sibling_pool, tail=options.tail
        )
        baselines = inputs.layout.scatter_to_tokens(made)
    else:
        layout = inputs.token_trees or inputs.layout
        if inputs.forest is not None:
            weights = weights * inputs.forest.weights.unsqueeze(-1)
        columns = layout.returns_weights_and_valid_by_index(returns, weights)
        shared = group_baselines(inputs.groups, *columns, tail=options.tail, leave_one_out=leave_one_out)
        baselines = layout.scatter_to_tokens(shared)
    return Advantages(advantages=returns - baselines, returns=returns, baselines=baselines)


def baseline_weights(inputs: EstimatorInputs, energies: Tensor, options: ProxyEnergyOptions) -> Tensor:
    """Compute W + eps from energies W [B, T] or [B, 1] that are sums of token energies."""
    if options.energy == "head_exact":
        return _add_epsilon(inputs, energies, _mean_squared_hidden_norm_by_group(inputs), options)
    return _add_epsilon(inputs, energies, torch.ones_like(inputs.totals), options)


def _add_epsilon(
    inputs: EstimatorInputs,
    energies: Tensor,
    scale: Tensor,
    options: ProxyEnergyOptions | ExactEnergyOptions,
) -> Tensor:
    """Compute W + eps from energies W [B, T] or [B, 1] and their scale [B]: positive on model tokens.

    A loss that averages every sequence over its tokens multiplies a trajectory's gradient by 1 / K, and therefore both
    W and eps by 1 / K^2. (Otherwise, eps would outweigh the energies of early tokens in long trajectories: 1 / K^2 is
    4e-9 for 16,000 tokens.)
    """
    weights = energies + options.epsilon * torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    if options.loss_aggregation == "seq_mean_token_mean":
        weights = weights / inputs.mean_lengths_by_tree.unsqueeze(-1).square()
    return weights


def _mean_squared_hidden_norm_by_group(inputs: EstimatorInputs) -> Tensor:
    """Return the mean ||h||^2 over the model tokens of the row's group [B], independent of other groups."""
    groups = inputs.groups
    sums = groups.broadcast_group_sum(inputs.token_field("hidden_norm_squared", allow_negative=False).sum(-1))
    return sums / groups.broadcast_group_sum(inputs.lengths)


@register_estimator(
    "ogb_pooled", options=PooledBaselineOptions, weighted=True, span="ranks", equal_groups=True, group_based=True
)
def pooled_optimal_global_baseline(inputs: EstimatorInputs, options: PooledBaselineOptions) -> Advantages:
    """Compute A_i = R_i - b_i, b_i = (sum_j W_j R_j + c P[W R]) / (sum_j W_j + c P[W]), with W of `ogb`.

    Sums are over i's group. P is the mean over all trajectories of the step's other groups, c = `pool`. A trajectory
    that is alone in the step has A = R.
    """
    groups, calls, present = inputs.groups, inputs.communicator, inputs.groups.present
    energies = importance_weighted_energy(inputs, options.energy).sum(-1, keepdim=True)
    returns = groups.stack(inputs.totals).masked_fill(~present, torch.inf)
    lowest = calls.all_gather(torch.cat([returns.flatten(), returns.new_full((1,), torch.inf)]).amin()).amin()
    leaf_weights = torch.ones_like(inputs.totals) if inputs.forest is None else inputs.forest.weights
    weights = baseline_weights(inputs, energies, options).squeeze(-1) * leaf_weights
    weights = groups.stack(weights).masked_fill(~present, 0.0)
    weighted = weights * (returns - lowest).masked_fill(~present, 0.0)  # exact for equal returns
    trajectories = groups.stack(leaf_weights).masked_fill(~present, 0.0).sum(-1, keepdim=True)
    elsewhere = calls.all_gather(trajectories.sum()).sum() - trajectories
    prior = options.pool / elsewhere.clamp(min=1)

    def others(terms: Tensor) -> Tensor:
        if inputs.forest is None:
            return sum_excluding_self(terms)
        trees = inputs.forest.siblings_by_level[0]
        return groups.stack(
            trees.sum_over_siblings(trees.sum_over_leaves(groups.unstack(terms).unsqueeze(-1))).squeeze(-1)
        )

    def expected(terms: Tensor) -> Tensor:
        own = others(terms) if options.leave_one_out else terms.sum(-1, keepdim=True)
        here = terms.sum(-1)
        other_calls = sum_excluding_self(calls.all_gather(here.sum()))[calls.participant_index]
        return own + prior * (sum_excluding_self(here) + other_calls).unsqueeze(-1)

    total, moment = expected(weights), expected(weighted)
    known = (groups.sizes.unsqueeze(-1) + elsewhere > 1) & (total > 0)
    shared = torch.where(known, lowest + moment / torch.where(known, total, 1.0), 0.0)
    return advantages_from_baselines(inputs.totals, groups.unstack(shared.expand(present.shape)))
