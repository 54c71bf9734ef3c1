"""The estimators: one function each, from a `Rollouts` to an `Estimate`.

Add one with the decorator; its options are the fields of a frozen dataclass:

    @register_estimator("mean", options=ScalarOptions)
    def mean(rollouts: Rollouts, options: ScalarOptions) -> Estimate: ...
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.aggregation import AGGREGATIONS
from agentrl.algorithms.baselines import TAILS, Columns, column_baselines
from agentrl.algorithms.energy import ENERGIES, realized_energy, token_energy
from agentrl.algorithms.errors import InvalidOptionError, check_choice
from agentrl.algorithms.normalization import NORMALIZATIONS
from agentrl.algorithms.records import AdvantageInputs
from agentrl.algorithms.registry import Registry
from agentrl.algorithms.segments import Compact, group_mean, relabel, reward_to_go, segment_sum


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """Options of the estimators that put one number on a trajectory."""

    normalize: str | None = None  # None, group_std or whiten: see FORMULAS 4

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, NORMALIZATIONS)


@dataclass(frozen=True, kw_only=True)
class TokenBaselineOptions:
    """Options of the optimal token baselines."""

    energy: str = "logit_proxy"  # logit_proxy, length or head_exact
    tail: str = "zero"  # zero, carry or self: the baseline where one trajectory is alone
    leave_one_out: bool = False  # leave a trajectory out of its own baseline: unbiased
    gamma: float = 1.0  # discount a model token, in [0, 1]
    normalize: str | None = None  # None, group_std or whiten
    epsilon: float = 1e-8  # added to the energies, in units of their scale
    loss_aggregation: str = "token_mean"  # how the loss weighs tokens: seq_mean_token_mean makes the weights W / K^2

    def __post_init__(self) -> None:
        check_choice("energy", self.energy, ENERGIES)
        check_choice("tail", self.tail, TAILS)
        check_choice("normalize", self.normalize, NORMALIZATIONS)
        check_choice("loss_aggregation", self.loss_aggregation, AGGREGATIONS)
        if not 0.0 <= self.gamma <= 1.0:
            raise InvalidOptionError(f"gamma={self.gamma} lies outside [0, 1]")
        if not 0.0 < self.epsilon < float("inf"):
            raise InvalidOptionError(f"epsilon={self.epsilon} must be positive and finite")


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Checked inputs with what every estimator needs derived from them; float64, NaN-free."""

    inputs: AdvantageInputs
    mask: Tensor  # [B, T] bool, model tokens
    rewards: Tensor  # [B, T], 0 off the mask
    labels: Tensor  # [B] groups renumbered 0 .. J-1
    groups: int  # J
    members: Tensor  # [B] trajectories in the row's group

    @classmethod
    def of(cls, inputs: AdvantageInputs, mask: Tensor) -> "Rollouts":
        """From inputs that `check_advantage_inputs` has passed."""
        labels, groups = relabel(inputs.groups)
        members = segment_sum(torch.ones_like(labels), labels, groups)[labels]
        rewards = torch.where(mask, inputs.rewards.detach().double(), 0.0)
        return cls(inputs=inputs, mask=mask, rewards=rewards, labels=labels, groups=groups, members=members)

    def group_means(self, values: Tensor) -> Tensor:
        """Mean over the row's group of values [B] -> [B]."""
        return group_mean(values, self.labels, self.groups)[self.labels]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Each [B, T] or, for one number a trajectory, [B, 1]; what stands off the model tokens does not matter."""

    advantages: Tensor
    returns: Tensor
    baselines: Tensor


EstimatorFunction = Callable[[Rollouts, ScalarOptions | TokenBaselineOptions], Estimate]
ESTIMATORS: Registry[Callable[..., Estimate]] = Registry("estimator")
register_estimator = ESTIMATORS.register


@register_estimator("grpo", options=ScalarOptions)
def grpo(rollouts: Rollouts, options: ScalarOptions) -> Estimate:
    """A = (R - mean) / (std + 1e-6) over the group, std unbiased (Shao et al., arXiv 2402.03300).

    A group of one: mean 0 and std 1, so A = R.
    """
    totals = rollouts.rewards.sum(-1)
    alone = rollouts.members == 1
    means = torch.where(alone, 0.0, rollouts.group_means(totals))
    squares = segment_sum((totals - means).square(), rollouts.labels, rollouts.groups)[rollouts.labels]
    spread = (squares / (rollouts.members - 1).clamp(min=1)).sqrt() + 1e-6
    advantages = (totals - means) / torch.where(alone, 1.0, spread)
    return _scalar(advantages, totals, means)


@register_estimator("rloo", options=ScalarOptions)
def rloo(rollouts: Rollouts, options: ScalarOptions) -> Estimate:
    """A = R - mean of the others = N / (N - 1) (R - mean) (Ahmadian et al., arXiv 2402.14740).

    A group of one: baseline 0, so A = R.
    """
    totals = rollouts.rewards.sum(-1)
    alone = rollouts.members == 1
    members = rollouts.members.double()
    factor = members / (members - 1).clamp(min=1)
    advantages = torch.where(alone, totals, factor * (totals - rollouts.group_means(totals)))
    return _scalar(advantages, totals, totals - advantages)


@register_estimator("otb", options=TokenBaselineOptions)
def otb(rollouts: Rollouts, options: TokenBaselineOptions) -> Estimate:
    """A_t = G_t - b_t, b_t = sum (W_t + eps) G_t / sum (W_t + eps) over the group's model tokens in *column* t.

    The Optimal Token Baseline (arXiv 2602.07078, Theorem 4.1) for left-aligned answers without observations. With
    observations a column mixes model tokens of some trajectories with gaps of others: use `tir_otb`.
    """
    layout = Compact.of(rollouts.mask)
    returns = layout.scatter(reward_to_go(layout.gather(rollouts.rewards), options.gamma))
    columns = Columns(
        returns=returns,
        weights=_weights(rollouts, options),
        valid=rollouts.mask,
        labels=rollouts.labels,
        groups=rollouts.groups,
    )
    baselines = column_baselines(columns, tail=options.tail, leave_one_out=options.leave_one_out)
    return Estimate(advantages=returns - baselines, returns=returns, baselines=baselines)


@register_estimator("tir_otb", options=TokenBaselineOptions)
def tir_otb(rollouts: Rollouts, options: TokenBaselineOptions) -> Estimate:
    """A_k = G_k - b_k, b_k = sum (W_k + eps) G_k / sum (W_k + eps) over the group's trajectories with K > k.

    The Optimal Token Baseline (arXiv 2602.07078) for tool-integrated reasoning: k counts model tokens, observations are
    taken out before and put back after. Equals `otb` on contiguous, left-aligned masks.
    """
    layout = Compact.of(rollouts.mask)
    returns = reward_to_go(layout.gather(rollouts.rewards), options.gamma)
    columns = Columns(
        returns=returns,
        weights=layout.gather(_weights(rollouts, options)),
        valid=layout.valid,
        labels=rollouts.labels,
        groups=rollouts.groups,
    )
    baselines = column_baselines(columns, tail=options.tail, leave_one_out=options.leave_one_out)
    return Estimate(
        advantages=layout.scatter(returns - baselines),
        returns=layout.scatter(returns),
        baselines=layout.scatter(baselines),
    )


def _scalar(advantages: Tensor, returns: Tensor, baselines: Tensor) -> Estimate:
    return Estimate(
        advantages=advantages.unsqueeze(-1), returns=returns.unsqueeze(-1), baselines=baselines.unsqueeze(-1)
    )


def _weights(rollouts: Rollouts, options: TokenBaselineOptions) -> Tensor:
    """W + eps [B, T], the weights of the optimal baselines; positive on model tokens."""
    mask = rollouts.mask
    energies = token_energy(rollouts.inputs, mask, options.energy)
    ratio = rollouts.inputs.importance_weights
    weights = realized_energy(energies, mask, None if ratio is None else ratio.detach().double())
    if options.loss_aggregation == "seq_mean_token_mean":
        weights = weights / mask.sum(-1, keepdim=True).square()
    if options.energy != "head_exact":
        return weights + options.epsilon
    return weights + options.epsilon * _hidden_scale(rollouts).unsqueeze(-1)


def _hidden_scale(rollouts: Rollouts) -> Tensor:
    """Mean ||h||^2 over the model tokens of the row's group [B], so that no other group changes the result."""
    norms = rollouts.inputs.hidden_norm_squared
    assert norms is not None  # token_energy has read it
    sums = segment_sum(torch.where(rollouts.mask, norms.double(), 0.0).sum(-1), rollouts.labels, rollouts.groups)
    counts = segment_sum(rollouts.mask.sum(-1), rollouts.labels, rollouts.groups)
    scale = sums / counts
    return torch.where(scale > 0, scale, 1.0)[rollouts.labels]
