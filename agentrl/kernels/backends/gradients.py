"""The gradient of a loss of log_prob and entropy with respect to a row of logits, as three numbers a row."""

from typing import NamedTuple

from torch import Tensor

IMPOSSIBLE = -1e4
"""Stands for ln 0 where 0 * ln 0 must be 0; its exponential is 0 in float64 too."""


class RowCoefficients(NamedTuple):
    """Coefficients of a row's gradient, which is p (offset + slope ln p), but at_target at the target. Each [N]."""

    offset: Tensor
    slope: Tensor | None
    at_target: Tensor


def row_coefficients(g: Tensor | None, e: Tensor | None, log_probs: Tensor, entropy: Tensor) -> RowCoefficients:
    """docs/formulas.md 2 for tempered logits: g (onehot - p) - e p (ln p + entropy).

    g and e [N] are the gradients of the loss with respect to log_prob and entropy, None where the loss does not use
    one. log_probs and entropy [N] are the forward pass's.
    """
    scale = log_probs.new_zeros(log_probs.shape) if g is None else g.to(log_probs.dtype)
    at_target = -log_probs.expm1() * scale  # g (1 - p), without cancellation near p = 1
    if e is None:
        return RowCoefficients(offset=-scale, slope=None, at_target=at_target)
    slope = -e.to(log_probs.dtype)
    return RowCoefficients(
        offset=slope * entropy - scale,
        slope=slope,
        at_target=at_target + slope * log_probs.exp() * (log_probs.clamp(min=IMPOSSIBLE) + entropy),
    )
