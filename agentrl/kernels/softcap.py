"""Soft capping of logits, z = cap tanh(x / cap) for the head's output x, and its derivative.

A scale of the output needs no extra case: softmax(s x / T) is softmax(x / (T / s)), and z = cap tanh(s x / cap) is
s (cap / s) tanh(x / (cap / s)). Temperatures and caps of the kernels are therefore in units of the head's output.
"""

from torch import Tensor


def cap_and_temper(logits: Tensor, cap: float, temperature: float) -> Tensor:
    """Compute cap tanh(x / cap) / T in place of the head's output x."""
    return logits.div_(cap).tanh_().mul_(cap / temperature)


def cap_slope(tempered: Tensor, cap: float, temperature: float = 1.0) -> Tensor:
    """Compute dz/dx = 1 - tanh(x / cap)^2 from the result of :func:`cap_and_temper`."""
    return 1 - (tempered * (temperature / cap)).square()
