"""Random numbers that belong to a token, not to the order in which tokens are met."""

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood 2014), its constants as signed numbers: int64 products wrap around as unsigned do.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def token_draws(keys: Tensor, width: int, seed: int) -> Tensor:
    """[B, width] int64, uniform over all int64: a function of (seed, keys[row], position) alone. keys [B] int64."""
    positions = torch.arange(width, dtype=torch.int64, device=keys.device)
    start = torch.full_like(keys, seed)
    return _mix(_mix(_mix(start) ^ keys).unsqueeze(-1) ^ positions)


def _mix(x: Tensor) -> Tensor:
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """x >> places without the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)
