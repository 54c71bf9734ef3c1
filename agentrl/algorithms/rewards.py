"""Additions to rewards."""

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError, InvalidOptionError
from agentrl.algorithms.validation import as_mask, check_alike, check_positive


def overlong_penalty(lengths: Tensor, *, max_length: float, buffer: float) -> Tensor:
    """DAPO's soft penalty [B] for responses of `lengths` [B] *model* tokens (arXiv 2503.14476).

    0 for L <= max_length - buffer, (max_length - buffer - L) / buffer up to max_length, -1 above. InvalidOptionError
    unless 0 < buffer <= max_length.

    >>> overlong_penalty(torch.tensor([60, 80, 90, 100, 101]), max_length=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    check_positive("buffer", buffer)
    if not buffer <= max_length < float("inf"):
        raise InvalidOptionError(f"max_length={max_length} must be finite and at least buffer={buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def add_at_last_token(rewards: Tensor, response_mask: Tensor, amounts: Tensor) -> Tensor:
    """rewards [B, T] with amounts [B] added at each row's last model token. Rows without one are InvalidInputError."""
    mask = as_mask("response_mask", response_mask)
    check_alike(rewards=rewards, response_mask=mask)
    if amounts.shape != rewards.shape[:1]:
        raise InvalidInputError(f"amounts must be [B] = {tuple(rewards.shape[:1])}; got {tuple(amounts.shape)}")
    if not bool(mask.any(-1).all()):
        raise InvalidInputError(f"row {int((~mask.any(-1)).nonzero()[0])} has no model token to carry an amount")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).max(-1, keepdim=True).values  # (B, 1)
    return torch.where(positions == last, rewards + amounts.unsqueeze(-1).to(rewards.dtype), rewards)
