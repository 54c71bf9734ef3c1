"""Baselines that were compared with `tir_otb` and not adopted. docs/research/variance.md has the results.

agentrl variance plugins=[benchmarks/tried_estimators.py] --estimators rloo,otb_shrunk:trust=4,otb_smoothed:reach=8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import Advantages, EstimatorInputs, TokenBaselineOptions, register_estimator
from agentrl.algorithms.estimators.baselines import group_baselines, importance_weighted_energy
from agentrl.algorithms.estimators.classic import weighted_group_means
from agentrl.algorithms.estimators.optimal import baseline_weights, sum_excluding_self
from agentrl.algorithms.estimators.registry import PooledBaselineOptions
from agentrl.algorithms.options import check_positive, check_range, checked_option
from agentrl.kernels.arithmetic import cumulative_sum


@dataclass(frozen=True, kw_only=True)
class ShrunkOptions(TokenBaselineOptions):
    """Options of `otb_shrunk`."""

    trust: float = checked_option(4.0, check_positive)  # contributors at which both baselines have equal weight


@register_estimator(
    "otb_shrunk", weighted=True, options=ShrunkOptions, aggregation="token_mean", group_based=True, per_token=True
)
def otb_shrunk(inputs: EstimatorInputs, options: ShrunkOptions) -> Advantages:
    """Compute A_k = G_k - (n_k b_k + c b) / (n_k + c): b_k of `tir_otb`, shrunk toward b of `ogb` for small n_k.

    n_k trajectories contribute to b_k, and c = `trust`. Only for outcome rewards, because b is a mean of returns.
    """
    energies = importance_weighted_energy(inputs, options.energy)
    by_index, count = _baselines(inputs, baseline_weights(inputs, cumulative_sum(energies), options), options)
    whole = baseline_weights(inputs, energies.sum(-1, keepdim=True), options).squeeze(-1)
    of_all = weighted_group_means(inputs, whole, leave_one_out=options.leave_one_out).unsqueeze(-1)
    shared = (count * by_index + options.trust * of_all) / (count + options.trust)
    return _advantages(inputs, shared, options)


@dataclass(frozen=True, kw_only=True)
class SmoothedOptions(TokenBaselineOptions):
    """Options of `otb_smoothed`."""

    reach: float = checked_option(8.0, check_positive)  # distance in model tokens at which an energy has weight 1/e


@register_estimator(
    "otb_smoothed", weighted=True, options=SmoothedOptions, aggregation="token_mean", group_based=True, per_token=True
)
def otb_smoothed(inputs: EstimatorInputs, options: SmoothedOptions) -> Advantages:
    """Compute `otb_isolated` with smoothed energies: sum_j e^(-|j-k|/h) w_j / sum_j e^(-|j-k|/h).

    h = `reach`. Between `otb_isolated` (h = 0) and the same weight at every index (h large).
    """
    layout = inputs.layout
    compact, exists = layout.gather_tokens(importance_weighted_energy(inputs, options.energy)), layout.valid.double()
    place = torch.arange(compact.shape[1])
    near = torch.exp(-(place - place.unsqueeze(-1)).abs() / options.reach).double()
    smooth = layout.scatter_to_tokens((compact @ near) / (exists @ near).clamp(min=1e-12))
    shared, _ = _baselines(inputs, baseline_weights(inputs, smooth, options), options)
    return _advantages(inputs, shared, options)


def _baselines(inputs: EstimatorInputs, weights: Tensor, options: TokenBaselineOptions) -> tuple[Tensor, Tensor]:
    """Return baselines [B, K] by compact index, and how many of the group's trajectories contribute to each."""
    groups = inputs.groups
    returns, weights, valid = _columns(inputs, inputs.returns(options.gamma), weights)
    shared = group_baselines(groups, returns, weights, valid, tail=options.tail, leave_one_out=options.leave_one_out)
    count = (groups.stack(valid) & groups.present.unsqueeze(-1)).sum(1, keepdim=True)
    return shared, groups.unstack(count)


def _columns(inputs: EstimatorInputs, returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (returns, weights, valid) at every compact index, [B, K], with the weights of forked rollouts' leaves."""
    layout = inputs.token_trees or inputs.layout
    if inputs.forest is not None:
        weights = weights * inputs.forest.weights.unsqueeze(-1)
    return layout.returns_weights_and_valid_by_index(returns, weights)


def _advantages(
    inputs: EstimatorInputs, shared: Tensor, options: TokenBaselineOptions | PooledTokenOptions
) -> Advantages:
    returns = inputs.returns(options.gamma)
    baselines = inputs.layout.scatter_to_tokens(shared)
    return Advantages(advantages=returns - baselines, returns=returns, baselines=baselines)


@dataclass(frozen=True, kw_only=True)
class PooledTokenOptions(PooledBaselineOptions):
    """Options of `tir_otb_pooled`."""

    gamma: float = checked_option(1.0, check_range, 0.0, 1.0)  # discount a model token


@register_estimator(
    "tir_otb_pooled",
    weighted=True,
    options=PooledTokenOptions,
    span="ranks",
    aggregation="token_mean",
    equal_groups=True,
    group_based=True,
    per_token=True,
)
def tir_otb_pooled(inputs: EstimatorInputs, options: PooledTokenOptions) -> Advantages:
    """Compute `ogb_pooled` at every compact index k, with W_k and G_k as in `tir_otb`.

    Sums and P include the trajectories with K > k. If only one trajectory of the step reaches k, its baseline is that
    of the last index that another trajectory reaches, or 0. Supports only one rank.
    """
    returns = inputs.returns(options.gamma)
    weights = baseline_weights(inputs, cumulative_sum(importance_weighted_energy(inputs, options.energy)), options)
    groups = inputs.groups
    column_returns, column_weights, valid = map(groups.stack, _columns(inputs, returns, weights))  # [J, N, K]
    valid = valid & groups.present.unsqueeze(-1)
    lowest = column_returns.masked_fill(~valid, torch.inf).flatten(0, 1).amin(0)
    lowest = lowest.masked_fill(lowest == torch.inf, 0.0)
    positive = column_weights.masked_fill(~valid, 0.0)
    count = valid.sum(1, keepdim=True)
    elsewhere = count.sum(0) - count
    prior = options.pool / elsewhere.clamp(min=1).double()

    def expected(terms: Tensor) -> Tensor:
        own = _others(terms, 1) if options.leave_one_out else terms.sum(1, keepdim=True).expand_as(terms)
        return own + prior * _others(terms.sum(1, keepdim=True), 0)

    total = expected(positive)
    moment = expected(positive * (column_returns - lowest).masked_fill(~valid, 0.0))
    known = count - valid.long() + elsewhere > 0
    shared = lowest + moment / torch.where(known, total, 1.0)
    last = torch.where(known, torch.arange(shared.shape[-1]), -1).cummax(-1).values
    carried = shared.gather(-1, last.clamp(min=0)).masked_fill(last < 0, 0.0)
    return _advantages(inputs, groups.unstack(carried), options)


def _others(terms: Tensor, dimension: int) -> Tensor:
    return sum_excluding_self(terms.movedim(dimension, -1)).movedim(-1, dimension)
