"""Estimators of one number a token that take no baseline from the group: `reinforce_pp` and `gae`."""

import torch

from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.options import DiscountedOptions, GaeOptions
from agentrl.algorithms.estimators.registry import register_estimator
from agentrl.algorithms.estimators.rows.segments import BranchWays, reward_to_go
from agentrl.algorithms.records import Advantages


@register_estimator("reinforce_pp", options=DiscountedOptions, per_token=True)
def reinforce_pp(inputs: EstimatorInputs, options: DiscountedOptions) -> Advantages:
    """A_k = G_k, then whitened over the step: the default of `normalize` (Hu, arXiv 2501.03262)."""
    returns = inputs.returns(options.gamma)
    return Advantages(advantages=returns, returns=returns, baselines=torch.zeros_like(returns))


@register_estimator("gae", options=GaeOptions, requires=("values",), per_token=True)
def gae(inputs: EstimatorInputs, options: GaeOptions) -> Advantages:
    """A_k = delta_k + gamma lam A_{k+1}, delta_k = r_k + gamma V_{k+1} - V_k (Schulman et al., arXiv 1506.02438).

    k + 1 is the next model token, whatever stands between. V after the last one is the row's `bootstrap_values`: 0
    where the episode ended, the critic's value of what would have come next where it was truncated. The returns, the
    critic's targets, are A + V; A is whitened after that (the default of `normalize`).

    In branched rollouts every way from the root to a leaf is such a row, with the rollout's `bootstrap_values` at its
    end; a token on several ways has the mean of its advantages there.
    """
    layout, rewards = inputs.sequences
    values = layout.gather(inputs.read("values"))  # [B, K]
    following = torch.zeros_like(values)
    following[:, :-1] = values[:, 1:]
    if inputs.given.bootstrap_values is not None:
        after = inputs.read_trajectories("bootstrap_values")
        after = after[layout.rollout] if isinstance(layout, BranchWays) else after
        following.scatter_(-1, layout.valid.sum(-1, keepdim=True) - 1, after.unsqueeze(-1))
    errors = rewards + options.gamma * following - values
    advantages = reward_to_go(errors, options.gamma * options.lam)
    return Advantages(
        advantages=layout.scatter(advantages),
        returns=layout.scatter(advantages + values),
        baselines=layout.scatter(values),
    )
