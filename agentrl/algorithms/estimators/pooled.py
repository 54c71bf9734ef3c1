"""Optimal baselines of the other trajectories, with the step's other groups as prior (docs/formulas.md 4).

The optimal baseline is a ratio of expectations, E[W R] / E[W]. From the few other trajectories of a small group both
are badly known: if one outcome is rare, the others often hold none of it. So each expectation is shrunk towards its
mean over all other groups of the step, as if a group had `pool` more trajectories. A trajectory's own return is in
neither, so the gradient keeps its expectation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.algorithms.estimators.calls import Calls
from agentrl.algorithms.estimators.energy import weighed_energy
from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.optimal import energy_weights
from agentrl.algorithms.estimators.options import PooledOptions, PooledTokenOptions
from agentrl.algorithms.estimators.registry import register_estimator
from agentrl.algorithms.estimators.scalar import scalar_estimate
from agentrl.algorithms.records import Advantages
from agentrl.kernels.backends.running import running_sum


@register_estimator("ogb_pooled", options=PooledOptions, pooled=True, group_based=True)
def ogb_pooled(inputs: EstimatorInputs, options: PooledOptions) -> Advantages:
    """A_i = R_i - b_i, b_i = (sum_{j != i} W_j R_j + c P[W R]) / (sum_{j != i} W_j + c P[W]), W as in `ogb`.

    P is the mean over all trajectories of the step's other groups, c = `pool`. Alone in the step: A = R.
    """
    energies = weighed_energy(inputs, options.energy).sum(-1, keepdim=True)
    weights = energy_weights(inputs, energies, options)
    columns = _Columns.of(inputs, inputs.totals.unsqueeze(-1), weights, torch.ones_like(weights, dtype=torch.bool))
    return scalar_estimate(inputs.totals, inputs.groups.unstack(columns.baselines(options)).squeeze(-1))


@register_estimator("tir_otb_pooled", options=PooledTokenOptions, pooled=True, group_based=True)
def tir_otb_pooled(inputs: EstimatorInputs, options: PooledTokenOptions) -> Advantages:
    """As `ogb_pooled` at every compact index k, W_k and G_k as in `tir_otb`; sums and P over trajectories with K > k.

    Alone in the step at k: the baseline of the last index that is shared, 0 if there is none.
    """
    layout = inputs.paths or inputs.layout
    energies = weighed_energy(inputs, options.energy)
    sums = running_sum(energies) if inputs.paths is None else inputs.paths.sums(energies)
    returns = inputs.returns(options.gamma)
    columns = _Columns.of(inputs, *layout.columns(returns, energy_weights(inputs, sums, options)))
    baselines = layout.scatter(inputs.groups.unstack(columns.baselines(options)))
    return Advantages(advantages=returns - baselines, returns=returns, baselines=baselines)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """What shares a baseline, group by group: [J, N, C], 0 where not valid, returns above the step's lowest.

    C is that of the step's widest call.
    """

    weights: Tensor
    weighted: Tensor  # weights * (G - lowest)
    valid: Tensor
    lowest: Tensor  # [C]
    calls: Calls

    @classmethod
    def of(cls, inputs: EstimatorInputs, returns: Tensor, weights: Tensor, valid: Tensor) -> _Columns:
        """From [B, C] of the rows."""
        groups, calls = inputs.groups, inputs.calls
        missing = int(calls.gather(valid.new_tensor(valid.shape[1], dtype=torch.int64)).max()) - valid.shape[1]

        def stacked(values: Tensor) -> Tensor:
            return pad(groups.stack(values), (0, missing))

        real = stacked(valid) & groups.present.unsqueeze(-1)
        here = stacked(returns).masked_fill(~real, torch.inf).flatten(0, 1)
        least = torch.cat([here, here.new_full((1, here.shape[1]), torch.inf)]).amin(0)
        lowest = calls.gather(least).amin(0)
        lowest = lowest.masked_fill(lowest == torch.inf, 0.0)
        positive = stacked(weights).masked_fill(~real, 0.0)
        above = (stacked(returns) - lowest).masked_fill(~real, 0.0)
        return cls(weights=positive, weighted=positive * above, valid=real, lowest=lowest, calls=calls)

    def baselines(self, options: PooledOptions) -> Tensor:
        """b [J, N, C]; meaningless where not valid."""
        count = self.valid.sum(1, keepdim=True)
        elsewhere = self.calls.gather(count.sum((0, 1))).sum(0) - count
        prior = options.pool / elsewhere.clamp(min=1).double()
        of_group = _of_others if options.leave_one_out else _of_all
        total = of_group(self.weights) + prior * self._of_other_groups(self.weights)
        moment = of_group(self.weighted) + prior * self._of_other_groups(self.weighted)
        known = (count - self.valid.long() + elsewhere) > 0
        shared = self.lowest + moment / torch.where(known, total, 1.0)
        return _carried(shared, known)

    def _of_other_groups(self, terms: Tensor) -> Tensor:
        """Sums over the rows of all other groups of the step, [J, 1, C]."""
        groups = terms.sum(1)
        calls = self.calls.gather(groups.sum(0))
        of_other_calls = _of_others(calls.unsqueeze(0))[0, self.calls.place]
        return (_of_others(groups.unsqueeze(0))[0] + of_other_calls).unsqueeze(1)


def _of_all(terms: Tensor) -> Tensor:
    """Sums over the group, [J, N, C]."""
    return terms.sum(1, keepdim=True).expand_as(terms)


def _of_others(terms: Tensor) -> Tensor:
    """Sums over the other entries of dimension 1, formed without subtraction: no entry is lost beside a larger one."""
    return _before(terms) + _before(terms.flip(1)).flip(1)


def _before(terms: Tensor) -> Tensor:
    """Sums over the entries of dimension 1 before each."""
    sums = torch.zeros_like(terms)
    sums[:, 1:] = running_sum(terms[:, :-1].transpose(1, -1)).transpose(1, -1)
    return sums


def _carried(shared: Tensor, known: Tensor) -> Tensor:
    """Where nothing is known the last baseline before that is, 0 if there is none."""
    position = torch.arange(shared.shape[-1], device=shared.device)
    last = torch.where(known, position, -1)
    if last.shape[-1]:
        last = last.cummax(-1).values
    return shared.gather(-1, last.clamp(min=0)).masked_fill(last < 0, 0.0)
