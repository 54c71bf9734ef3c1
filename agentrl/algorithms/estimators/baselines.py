"""Token energies (docs/reference/formulas.md 3) and energy-weighted baselines: group means computed per column."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.options import MissingInputError, check_choice
from agentrl.algorithms.records import Groups

ENERGIES = ("logit_proxy", "length", "head_exact")


def logit_proxy_energy(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Compute w = ||e_y - p||^2 = (1 - p)^2 + sum_{v != y} p(v)^2 for inputs of any shape.

    w is not negative. (1 - p)^2 is accurate near p = 1. Only the kernel avoids the cancellation in sum p^2 - p^2, so
    prefer its `energy`.

    >>> round(logit_proxy_energy(torch.tensor(0.75).log(), torch.tensor(0.625)).item(), 6)
    0.125
    """
    others = (sum_pi_squared - (2 * log_probs).exp()).clamp(min=0.0)
    return torch.expm1(log_probs).square() + others


def token_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    """Compute w_t [B, T] in float64 for the kind `energy`. It is 0 outside the mask.

    `logit_proxy`: the kernel's `token_energy`, or computed from log_probs and sum_pi_squared. `head_exact`: the proxy
    times ||h||^2. The factor 1 / tau^2 of docs/reference/formulas.md 3 is omitted, because it cancels in every
    baseline. `length`: 1. Raises MissingInputError for a missing input and InvalidInputError for an invalid value.
    """
    check_choice("energy", energy, ENERGIES)
    if energy == "length":
        return inputs.mask.double()
    proxy = _proxy_energy(inputs, energy)
    if energy == "logit_proxy":
        return proxy
    return proxy.mul_(_read_energy_input(inputs, "hidden_norm_squared", energy, negative=False))


def importance_weighted_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    """Compute (rho_t loss_mask_t)^2 w_t on model tokens, [B, T]. Its running sum is the realized energy W_k.

    The ratio is inside that sum (arXiv 2602.07078, the line before Eq. 60).
    """
    energies = token_energy(inputs, energy)
    ratio = inputs.masked_importance_weights
    return energies if ratio is None else energies.mul_(ratio.square())


def _proxy_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    if inputs.source.token_energy is not None:
        return _read_energy_input(inputs, "token_energy", energy, negative=False)
    if inputs.source.log_probs is None and inputs.source.sum_pi_squared is None:
        raise MissingInputError(
            f"energy={energy!r} needs token_energy (TokenStatistics.energy of the forward pass), or log_probs and "
            "sum_pi_squared; energy='length' needs no input"
        )
    log_probs = _read_energy_input(inputs, "log_probs", energy)
    sum_pi_squared = _read_energy_input(inputs, "sum_pi_squared", energy)
    return logit_proxy_energy(log_probs, sum_pi_squared).masked_fill_(~inputs.mask, 0.0)


def _read_energy_input(inputs: EstimatorInputs, name: str, energy: str, *, negative: bool = True) -> Tensor:
    if getattr(inputs.source, name) is None:
        raise MissingInputError(
            f"energy={energy!r} needs {name} (TokenStatistics.{name} of the policy's forward); energy='length' "
            "needs no input"
        )
    return inputs.token_field(name, allow_negative=negative)


TAILS = ("zero", "carry", "self")


def group_baselines(
    groups: Groups, returns: Tensor, weights: Tensor, valid: Tensor | None = None, *, tail: str, leave_one_out: bool
) -> Tensor:
    """Compute b = sum W G / sum W over the group's entries of each column, [B, C].

    ``returns`` G, ``weights`` W + eps and ``valid`` are [B, C]. ``valid`` marks existing entries, by default all. For
    these, weights are positive.

    With `leave_one_out`, every entry is excluded from its own sums. If an entry is alone in its column, `tail`
    sets b: `zero` is 0, `self` is G, and `carry` is the row's last baseline in a column with two or more entries, or 0
    without such a column. A group with one row has baseline 0 everywhere. Values outside ``valid`` are arbitrary.
    """
    exists = groups.present.unsqueeze(-1) if valid is None else groups.stack(valid) & groups.present.unsqueeze(-1)
    returns, weights = groups.stack(returns), groups.stack(weights).masked_fill(~exists, 0.0)  # [J, N, C]
    count = exists.sum(1, keepdim=True)  # [J, 1, C]
    # Sum returns relative to the column's lowest return, so that the mean of equal returns is exact.
    lowest = returns.masked_fill(~exists, torch.inf).amin(1, keepdim=True)
    lowest = lowest.masked_fill_(lowest == torch.inf, 0.0)
    moments = weights * (returns - lowest).masked_fill_(~exists, 0.0)
    if leave_one_out:
        heaviest = weights.max(1, keepdim=True).indices
        total, moment = (_sums_of_other_rows(terms, heaviest) for terms in (weights, moments))
        total = total.masked_fill_(count - exists.long() == 0, 1.0)
    else:  # [J, 1, C]: the group's rows share the baseline
        total, moment = weights.sum(1, keepdim=True).masked_fill_(count == 0, 1.0), moments.sum(1, keepdim=True)
    baselines = lowest + moment / total
    alone = count == 1
    if tail == "zero":
        baselines = baselines.masked_fill(alone, 0.0)
    elif tail == "self":
        baselines = torch.where(alone, returns, baselines)
    else:
        last = torch.where(count >= 2, torch.arange(count.shape[-1], device=count.device), -1)
        if last.shape[-1]:
            last = last.cummax(-1).values  # the last column so far with two or more entries
        carried = baselines.gather(-1, last.clamp(min=0).expand_as(baselines)).masked_fill_(last < 0, 0.0)
        baselines = torch.where(alone, carried, baselines)
    return groups.unstack(baselines.masked_fill_((groups.sizes == 1)[:, None, None], 0.0))


def _sums_of_other_rows(terms: Tensor, heaviest: Tensor) -> Tensor:
    """Sum all other rows of [J, N, C]. ``heaviest`` [J, 1, C]: the row that may dominate the total.

    Subtracting a dominant row from the total cancels, so the sum without it is computed separately.
    """
    rest = terms.scatter(1, heaviest, 0.0).sum(1, keepdim=True)
    return (terms.sum(1, keepdim=True) - terms).scatter_(1, heaviest, rest)
