"""Per-token energies, which weigh the optimal baselines (docs/formulas.md 3)."""

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError, MissingInputError, check_choice
from agentrl.algorithms.estimators.inputs import EstimatorInputs

ENERGIES = ("logit_proxy", "length", "head_exact")


def logit_proxy_energy(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """w = ||e_y - p||^2 = (1 - p)^2 + sum_{v != y} p(v)^2, any shape, never negative, without cancellation near p = 1.

    That of sum p^2 - p^2 is avoided only inside the kernel: prefer its `energy`.

    >>> round(logit_proxy_energy(torch.tensor(0.75).log(), torch.tensor(0.625)).item(), 6)
    0.125
    """
    others = (sum_pi_squared - (2 * log_probs).exp()).clamp(min=0.0)
    return torch.expm1(log_probs).square() + others


@torch.no_grad()
def cross_energy(
    log_p: Tensor, targets: Tensor, importance_weights: Tensor | None = None, slope: Tensor | None = None
) -> Tensor:
    """sum_{j <= k} rho_j rho_k max(0, <delta_j, delta_k>) of one trajectory's K model tokens, [K] float64.

    log_p [K, V] are the log-probabilities of the whole vocabulary, targets [K] the sampled tokens, importance_weights
    [K] the truncated rho times the loss mask (1 if None); delta = e_y - p (arXiv 2602.07078, Eq. 46 and 48), times
    `slope` [K, V], dz/dx of what the head gives, where logits are capped. Memory and time: K^2 + K V (laboratory only).

    >>> both = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    >>> [round(value, 6) for value in cross_energy(both, torch.tensor([0, 1])).tolist()]
    [0.5, 0.5]
    """
    if log_p.ndim != 2 or targets.shape != log_p.shape[:1]:
        raise InvalidInputError(f"log_p must be [K, V], targets [K]; got {tuple(log_p.shape)}, {tuple(targets.shape)}")
    delta = -log_p.double().exp()
    delta.scatter_add_(-1, targets.unsqueeze(-1), torch.ones_like(delta[:, :1]))
    if slope is not None:
        delta *= slope
    products = (delta @ delta.t()).clamp_(min=0.0)
    if importance_weights is not None:
        ratio = importance_weights.double()
        products *= ratio * ratio.unsqueeze(-1)
    return products.tril().sum(-1)


def token_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    """w_t [B, T] in float64 of the kind `energy`, 0 off the mask.

    `logit_proxy`: the kernel's `token_energy`, else from log_probs and sum_pi_squared. `head_exact`: that times
    ||h||^2, without 1 / tau^2 of docs/formulas.md 3, which cancels in every baseline. `length`: 1. Raises
    MissingInputError (naming the setting) or InvalidInputError.
    """
    check_choice("energy", energy, ENERGIES)
    if energy == "length":
        return inputs.mask.double()
    proxy = _proxy(inputs, energy)
    if energy == "logit_proxy":
        return proxy
    return proxy.mul_(_read(inputs, "hidden_norm_squared", energy, negative=False))


def weighted_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    """(rho_t loss_mask_t)^2 w_t on model tokens, [B, T]; its running sum is the realized energy W_k.

    The ratio stands inside that sum (arXiv 2602.07078, the line before Eq. 60).
    """
    energies = token_energy(inputs, energy)
    ratio = inputs.loss_ratio
    return energies if ratio is None else energies.mul_(ratio.square())


def _proxy(inputs: EstimatorInputs, energy: str) -> Tensor:
    if inputs.given.token_energy is not None:
        return _read(inputs, "token_energy", energy, negative=False)
    if inputs.given.log_probs is None and inputs.given.sum_pi_squared is None:
        raise MissingInputError(
            f"energy={energy!r} needs token_energy (TokenStatistics.energy of the policy's forward), or log_probs and "
            "sum_pi_squared; energy='length' needs none"
        )
    log_probs = _read(inputs, "log_probs", energy)
    sum_pi_squared = _read(inputs, "sum_pi_squared", energy)
    return logit_proxy_energy(log_probs, sum_pi_squared).masked_fill_(~inputs.mask, 0.0)


def _read(inputs: EstimatorInputs, name: str, energy: str, *, negative: bool = True) -> Tensor:
    if getattr(inputs.given, name) is None:
        raise MissingInputError(
            f"energy={energy!r} needs {name} (TokenStatistics.{name} of the policy's forward); 'length' needs none"
        )
    return inputs.read(name, negative=negative)
