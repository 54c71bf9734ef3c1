"""Penalties that are added to rewards: for overlong responses and for the divergence from a reference policy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.kl import REWARD_KL_ESTIMATORS, kl_penalty
from agentrl.algorithms.options import (
    InvalidInputError,
    InvalidOptionError,
    check_choice,
    check_finite,
    check_positive,
    check_range,
    check_same_shape,
    to_bool_mask,
)


def overlong_penalty(lengths: Tensor, *, max_length: float, buffer: float) -> Tensor:
    """Compute DAPO's soft penalty [B] for responses of `lengths` [B] *model* tokens (arXiv 2503.14476).

    0 for L <= max_length - buffer, (max_length - buffer - L) / buffer up to max_length, -1 above. Raises
    InvalidOptionError unless 0 < buffer <= max_length.

    >>> overlong_penalty(torch.tensor([60, 80, 90, 100, 101]), max_length=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    check_positive("buffer", buffer)
    if not buffer <= max_length < float("inf"):
        raise InvalidOptionError(f"max_length={max_length} must be finite and at least buffer={buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def add_at_last_token(rewards: Tensor, response_mask: Tensor, amounts: Tensor) -> Tensor:
    """Add amounts [B] to rewards [B, T] at each row's last model token. Raises InvalidInputError for empty rows."""
    mask = to_bool_mask("response_mask", response_mask)
    check_same_shape(rewards=rewards, response_mask=mask)
    if amounts.shape != rewards.shape[:1]:
        raise InvalidInputError(f"amounts must be [B] = {tuple(rewards.shape[:1])}; got {tuple(amounts.shape)}")
    if not bool(mask.any(-1).all()):
        raise InvalidInputError(
            f"row {int((~mask.any(-1)).nonzero()[0])} has no model token to which an amount can be added"
        )
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).max(-1, keepdim=True).values  # (B, 1)
    return torch.where(positions == last, rewards + amounts.unsqueeze(-1).to(rewards.dtype), rewards)


@dataclass(frozen=True, kw_only=True)
class RewardKL:
    """Result of `reward_kl`: `rewards` [B, T] with the penalty, and `kl` [B, T] without beta, 0 outside the mask."""

    rewards: Tensor
    kl: Tensor


@torch.no_grad()
def reward_kl(
    rewards: Tensor,
    log_probs: Tensor,
    reference_log_probs: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
    estimator: str = "k1",
    full: Tensor | None = None,
) -> RewardKL:
    """Compute r_t - beta kl_t at model tokens; other positions are unchanged. All tensors are [B, T] and detached.

    `log_probs` come from the policy that sampled. With k1, the expected gradient is the same as for R - beta KL of
    whole trajectories. abs, k2 and k3 penalize other functions of the policy. `full` credits a token only with
    divergence at later tokens. Estimators `X+` differ from X only in their gradient and are not available here.

    Raises InvalidOptionError for an unknown estimator or negative beta, InvalidInputError for invalid tensors, and
    MissingInputError if `full` is needed and None.
    """
    check_choice("KL estimator in the reward", estimator, REWARD_KL_ESTIMATORS)
    check_range("beta", beta, 0.0)
    check_same_shape(rewards=rewards, log_probs=log_probs)
    mask = to_bool_mask("response_mask", response_mask)
    kl = kl_penalty(log_probs, reference_log_probs, estimator, mask=mask, full=full)
    check_finite("the KL penalty", kl, mask)
    return RewardKL(rewards=torch.where(mask, rewards - beta * kl, rewards), kl=kl)
