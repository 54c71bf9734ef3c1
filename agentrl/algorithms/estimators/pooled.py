"""The optimal global baseline with the step's other groups as prior (docs/formulas.md 4).

The optimal baseline is a ratio of expectations, E[W R] / E[W]. From the few trajectories of a small group both are
badly known: if one outcome is rare, the others often hold none of it. So each expectation is shrunk towards its mean
over all other groups of the step, as if a group had `pool` more trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.estimators.energy import weighted_energy
from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.optimal import energy_weights
from agentrl.algorithms.estimators.options import PooledOptions
from agentrl.algorithms.estimators.registry import register_estimator
from agentrl.algorithms.estimators.scalar import scalar_estimate
from agentrl.algorithms.records import Advantages
from agentrl.kernels.backends.running import running_sum


@register_estimator("ogb_pooled", options=PooledOptions, span="ranks", equal_groups=True, group_based=True)
def ogb_pooled(inputs: EstimatorInputs, options: PooledOptions) -> Advantages:
    """A_i = R_i - b_i, b_i = (sum_j W_j R_j + c P[W R]) / (sum_j W_j + c P[W]), W as in `ogb`; sums over i's group.

    P is the mean over all trajectories of the step's other groups, c = `pool`. Alone in the step: A = R.
    """
    groups, calls, present = inputs.groups, inputs.calls, inputs.groups.present
    energies = weighted_energy(inputs, options.energy).sum(-1, keepdim=True)
    returns = groups.stack(inputs.totals).masked_fill(~present, torch.inf)
    lowest = calls.gather(torch.cat([returns.flatten(), returns.new_full((1,), torch.inf)]).amin()).amin()
    weights = groups.stack(energy_weights(inputs, energies, options).squeeze(-1)).masked_fill(~present, 0.0)
    weighted = weights * (returns - lowest).masked_fill(~present, 0.0)  # above the lowest: equal returns stay exact
    elsewhere = calls.gather(present.sum()).sum() - present.sum(-1, keepdim=True)
    prior = options.pool / elsewhere.clamp(min=1).double()

    def expected(terms: Tensor) -> Tensor:
        own = of_others(terms) if options.leave_one_out else terms.sum(-1, keepdim=True)
        here = terms.sum(-1)
        other_calls = of_others(calls.gather(here.sum()))[calls.place]
        return own + prior * (of_others(here) + other_calls).unsqueeze(-1)

    total, moment = expected(weights), expected(weighted)
    known = groups.sizes.unsqueeze(-1) + elsewhere > 1
    shared = torch.where(known, lowest + moment / torch.where(known, total, 1.0), 0.0)
    return scalar_estimate(inputs.totals, groups.unstack(shared.expand(present.shape)))


def of_others(terms: Tensor) -> Tensor:
    """Sums over the other entries of the last dimension, formed without subtraction: none is lost beside a larger."""
    return _before(terms) + _before(terms.flip(-1)).flip(-1)


def _before(terms: Tensor) -> Tensor:
    sums = torch.zeros_like(terms)
    sums[..., 1:] = running_sum(terms[..., :-1])
    return sums
