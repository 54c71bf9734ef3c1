"""Penalties for leaving a reference policy, per token (FORMULAS 5)."""

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError, check_choice

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")
_EXPONENT_LIMIT = 20.0


def kl_penalty(log_probs: Tensor, reference_log_probs: Tensor, estimator: str, *, mask: Tensor | None = None) -> Tensor:
    """The penalty at every token, of the shape of `log_probs`; the reference is detached.

    With d = ln p_ref - ln p:  `k1` -d;  `abs` |d|;  `k2` d^2 / 2;  `k3` e^d - d - 1 (the exponent clamped to +-20,
    the result not);  `X+` has the value of X and the gradient of k2.

    As a *loss* on tokens sampled by p, the expected gradient is: k1 none at all; abs that of ||p - p_ref||_1; k3 that
    of the forward KL(p_ref || p); k2 and every `X+` that of KL(p || p_ref). Off-policy, multiply by the detached
    ratio. In the *reward* only k1 is exact.

    Where `mask` is False nothing is read and the penalty is 0; without one, all positions count.
    """
    check_choice("KL estimator", estimator, KL_ESTIMATORS)
    if log_probs.shape != reference_log_probs.shape:
        raise InvalidInputError(
            f"log_probs and reference_log_probs differ in shape: {tuple(log_probs.shape)}, "
            f"{tuple(reference_log_probs.shape)}"
        )
    reference = reference_log_probs.detach()
    if mask is not None:
        log_probs, reference = torch.where(mask, log_probs, 0.0), torch.where(mask, reference, 0.0)
    difference = reference - log_probs
    if not estimator.endswith("+"):
        return _plain(difference, estimator)
    square = _plain(difference, "k2")
    return square - square.detach() + _plain(difference, estimator[:-1]).detach()


def _plain(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    return difference.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp() - difference - 1
