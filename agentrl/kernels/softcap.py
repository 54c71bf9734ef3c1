"""Soft capping of logits, z = cap tanh(x / cap) of the head's output x, and its chain rule.

A scale needs nothing here: softmax(s x / T) is softmax(x / (T / s)), and z = cap tanh(s x / cap) is
s (cap / s) tanh(x / (cap / s)). So temperatures and caps of the kernels are in units of the head's output.
"""

from torch import Tensor


def cap_and_temper(logits: Tensor, cap: float, temperature: float) -> Tensor:
    """cap tanh(x / cap) / T in the memory of the head's output x."""
    return logits.div_(cap).tanh_().mul_(cap / temperature)


def cap_slope(tempered: Tensor, cap: float, temperature: float = 1.0) -> Tensor:
    """dz/dx = 1 - tanh(x / cap)^2, from what :func:`cap_and_temper` gives."""
    return 1 - (tempered * (temperature / cap)).square()
