"""KL penalty per token, and its coefficient beta: constant, or adapted to a target (docs/reference/formulas.md 5)."""

import math

import torch
from torch import Tensor

from agentrl.algorithms.options import (
    InvalidInputError,
    MissingInputError,
    check_choice,
    check_positive,
    check_range,
    to_bool_mask,
)

REWARD_KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "full")
KL_ESTIMATORS = (*REWARD_KL_ESTIMATORS, *(name + "+" for name in REWARD_KL_ESTIMATORS))
_EXPONENT_LIMIT = 20.0
_STEP_LIMIT = 0.2


def kl_penalty(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    estimator: str,
    *,
    mask: Tensor | None = None,
    full: Tensor | None = None,
    ratio: Tensor | None = None,
) -> Tensor:
    """Compute the KL penalty of every token, in the shape of `log_probs`. The reference is detached.

    With d = ln p_ref - ln p:  `k1` -d;  `abs` |d|;  `k2` d^2 / 2;  `k3` e^d - d - 1 (the exponent clamped to +-20,
    the result not);  `full` the exact KL(p || p_ref) over the vocabulary, given as the tensor `full` (see
    `agentrl.kernels.full_kl`);  `X+` has the value of X and the gradient of k2.

    As a *loss* on tokens sampled by p, the expected gradient is: 0 for k1; the gradient of ||p - p_ref||_1 for abs; of
    the forward KL(p_ref || p) for k3; of KL(p || p_ref), given the prefix, for k2, `full` and every `X+`. For tokens
    sampled by another policy, pass the `ratio` of p to this policy. The penalty is then multiplied by the detached
    ratio, and its expected gradient is the same. In the *reward*, only k1 is exact: see `reward_kl`. Where `mask` is
    False, the penalty is 0 and no value is read.

    Raises InvalidOptionError for an unknown estimator, InvalidInputError for mismatched shapes, and MissingInputError
    if `full` is needed and None.
    """
    check_choice("KL estimator", estimator, KL_ESTIMATORS)
    tensors = {"reference_log_probs": reference_log_probs, "mask": mask, "full": full, "ratio": ratio}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != log_probs.shape:
            raise InvalidInputError(
                f"log_probs and {name} must have the same shape; got {tuple(log_probs.shape)} and {tuple(tensor.shape)}"
            )
    if mask is not None:
        mask = to_bool_mask("mask", mask)
    difference = _zero_off_mask(reference_log_probs.detach(), mask) - _zero_off_mask(log_probs, mask)
    penalty = _estimate(difference, estimator.removesuffix("+"), None if full is None else _zero_off_mask(full, mask))
    if estimator.endswith("+"):
        square = difference.square() / 2
        penalty = square - square.detach() + penalty.detach()
    if ratio is not None:
        penalty = penalty * _zero_off_mask(ratio.detach(), mask)
    return penalty if mask is None else torch.where(mask, penalty, 0.0)


def _zero_off_mask(tensor: Tensor, mask: Tensor | None) -> Tensor:
    return tensor if mask is None else torch.where(mask, tensor, 0.0)


def _estimate(difference: Tensor, estimator: str, full: Tensor | None) -> Tensor:
    if estimator == "full":
        if full is None:
            raise MissingInputError(
                "the KL estimator 'full' needs the tensor `full`: compute it with agentrl.kernels.full_kl from the "
                "hidden states and heads of both policies"
            )
        return full
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    return difference.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp() - difference - 1


class KLController:
    """Controller of the KL coefficient `beta` of each step. Updated with the measured KL after the step."""

    def __init__(self, beta: float) -> None:
        check_range("beta", beta, 0.0)
        self.beta = beta

    def update(self, kl: float, trajectories: int) -> None:
        """Update beta from the mean KL of a step's tokens and its number of trajectories."""
        if not math.isfinite(kl) or trajectories < 0:
            raise InvalidInputError(
                f"kl must be finite and trajectories must not be negative; got {kl} and {trajectories}"
            )

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: {"beta": ...}."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state returned by `state_dict`."""


class FixedKL(KLController):
    """Constant beta from the settings. A resumed run ignores the value in the checkpoint."""


class AdaptiveKL(KLController):
    """beta *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon after a step of n trajectories (arXiv 1909.08593).

    >>> controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    >>> controller.update(0.2, trajectories=100)
    >>> round(controller.beta, 6)
    0.102
    """

    def __init__(self, beta: float, *, target: float, horizon: float) -> None:
        """`beta` is the initial coefficient, positive because 0 would never change. `horizon` is in trajectories."""
        check_positive("beta", beta)
        check_positive("target", target)
        check_positive("horizon", horizon)
        super().__init__(beta)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, trajectories: int) -> None:
        """Apply one step of proportional control. Raises InvalidInputError if beta would not remain positive."""
        super().update(kl, trajectories)
        error = min(max(kl / self.target - 1, -_STEP_LIMIT), _STEP_LIMIT)
        factor = 1 + error * trajectories / self.horizon
        if factor <= 0:
            raise InvalidInputError(
                f"a step of {trajectories} trajectories is too large for a KL horizon of {self.horizon:g}: "
                f"beta would become negative. Set the horizon to more than a fifth of the trajectories per step"
            )
        self.beta *= factor

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore beta. Target and horizon come from the settings."""
        check_positive("beta", state["beta"])
        self.beta = state["beta"]
