"""Per-token energies and the realized energy that weighs the optimal baselines (FORMULAS 3)."""

import torch
from torch import Tensor

from agentrl.algorithms.errors import MissingInputError, check_choice
from agentrl.algorithms.records import AdvantageInputs
from agentrl.algorithms.validation import check_finite, check_not_negative

ENERGIES = ("logit_proxy", "length", "head_exact")


def logit_proxy_energy(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """w = ||e_y - p||^2 = (1 - p)^2 + sum_{v != y} p(v)^2, any shape, never negative.

    Same number as 1 - 2 p + sum p^2 without its cancellation near p = 1. The remaining one, sum p^2 - p^2, is avoided
    only inside the kernel: prefer its `energy`.

    >>> round(logit_proxy_energy(torch.tensor(0.75).log(), torch.tensor(0.625)).item(), 6)
    0.125
    """
    others = (sum_pi_squared - (2 * log_probs).exp()).clamp(min=0.0)
    return torch.expm1(log_probs).square() + others


def realized_energy(
    token_energy: Tensor,
    response_mask: Tensor,
    importance_weights: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """W_k = sum_{j <= k} (rho_j loss_mask_j)^2 w_j over model tokens, [B, T]; at other positions the last W before
    them.

    The ratio stands inside the sum (arXiv 2602.07078, the line before Eq. 60). Values off the response mask are not
    read.
    """
    counted = response_mask if loss_mask is None else response_mask & loss_mask
    weighed = torch.where(counted, token_energy, 0.0)
    if importance_weights is not None:
        weighed = weighed * torch.where(counted, importance_weights, 0.0).square()
    return weighed.cumsum(-1)


def token_energy(inputs: AdvantageInputs, mask: Tensor, energy: str) -> Tensor:
    """w_t [B, T] in float64 of the kind `energy`, 0 off the mask.

    `logit_proxy`: the kernel's `token_energy`, else from log_probs and sum_pi_squared. `head_exact`: that times
    ||h||^2; the 1 / tau^2 of FORMULAS 3 is left out, because a factor common to all tokens cancels in every baseline.
    `length`: 1.

    Raises MissingInputError (naming the setting) or InvalidInputError.
    """
    check_choice("energy", energy, ENERGIES)
    if energy == "length":
        return mask.double()
    proxy = _proxy(inputs, mask, energy)
    if energy == "logit_proxy":
        return proxy
    norms = _read(inputs, "hidden_norm_squared", mask, energy)
    check_not_negative("hidden_norm_squared", norms, mask)
    return proxy * norms


def _proxy(inputs: AdvantageInputs, mask: Tensor, energy: str) -> Tensor:
    if inputs.token_energy is not None:
        given = _read(inputs, "token_energy", mask, energy)
        check_not_negative("token_energy", given, mask)
        return given
    if inputs.log_probs is None and inputs.sum_pi_squared is None:
        raise MissingInputError(
            f"energy={energy!r} needs token_energy (TokenStatistics.energy of the policy's forward), or log_probs and "
            "sum_pi_squared; energy='length' needs none"
        )
    log_probs = _read(inputs, "log_probs", mask, energy)
    sum_pi_squared = _read(inputs, "sum_pi_squared", mask, energy)
    return torch.where(mask, logit_proxy_energy(log_probs, sum_pi_squared), 0.0)


def _read(inputs: AdvantageInputs, name: str, mask: Tensor, energy: str) -> Tensor:
    tensor = getattr(inputs, name)
    if tensor is None:
        raise MissingInputError(
            f"energy={energy!r} needs {name} (TokenStatistics.{name} of the policy's forward); 'length' needs none"
        )
    check_finite(name, tensor, mask)
    return torch.where(mask, tensor.detach().double(), 0.0)
