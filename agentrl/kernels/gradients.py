"""Gradients with respect to a head's logits, hidden states, weight and bias.

The gradient of a row of logits follows from three coefficients. The other gradients are computed by blocks of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.kernels.arithmetic import (
    IMPOSSIBLE,
    head_input_gradient,
    logit_gradient_dtype,
    matmul_into,
)


class LogitGradientCoefficients(NamedTuple):
    """Coefficients [N] of a row's logit gradient: p (offset + slope ln p), except `at_target` at the target."""

    offset: Tensor
    slope: Tensor | None
    at_target: Tensor


def logit_gradient_coefficients(
    log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None, log_probs: Tensor, entropy: Tensor
) -> LogitGradientCoefficients:
    """Compute the coefficients of the gradient g (onehot - p) - e p (ln p + entropy) (docs/reference/formulas.md 2).

    g and e [N] are the gradients of the loss with respect to log_prob and entropy, or None if the loss does not use
    them. log_probs and entropy [N] come from the forward pass.
    """
    scale = log_probs.new_zeros(log_probs.shape) if log_prob_gradient is None else log_prob_gradient.to(log_probs.dtype)
    at_target = -log_probs.expm1() * scale  # g (1 - p), without cancellation near p = 1
    if entropy_gradient is None:
        return LogitGradientCoefficients(offset=-scale, slope=None, at_target=at_target)
    slope = -entropy_gradient.to(log_probs.dtype)
    return LogitGradientCoefficients(
        offset=slope * entropy - scale,
        slope=slope,
        at_target=at_target + slope * log_probs.exp() * (log_probs.clamp(min=IMPOSSIBLE) + entropy),
    )


class HeadGradientAccumulator:
    """Gradients of hidden, weight and bias, summed over blocks of rows; None where `needed` is False."""

    def __init__(
        self, inputs: tuple[Tensor, Tensor, Tensor | None], needed: tuple[bool, ...], dtype: torch.dtype
    ) -> None:
        """`inputs` are hidden, weight and bias. Sums over rows are in `dtype`."""
        self._inputs = hidden, weight, bias = inputs
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add_logit_gradient(self, rows: slice, d_logits: Tensor, temperature: float = 1.0) -> None:
        """Add dz [R, V]: the temperature times the gradient with respect to the head's output of these rows.

        May overwrite dz, because a copy would be as large as the block.
        """
        hidden, weight, _ = self._inputs
        if self._bias is not None:
            self._bias += _divide_by_temperature(d_logits.sum(0), temperature)
        if self._hidden is not None:
            self._hidden[rows] = _divide_by_temperature(head_input_gradient(d_logits, weight), temperature)
        if self._weight is None:
            return
        # float16 would underflow for the smallest gradients; bfloat16 has the range of float32.
        if logit_gradient_dtype(hidden, weight, d_logits.dtype) == torch.bfloat16:
            d_logits = d_logits if temperature == 1.0 else d_logits.div_(temperature)
            matmul_into(d_logits.t().bfloat16(), hidden[rows], self._weight, accumulate=True)
        else:
            states = _divide_by_temperature(hidden[rows].to(d_logits.dtype), temperature)
            self._weight.addmm_(d_logits.t(), states)

    def input_gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of (hidden, weight, bias), each in the dtype of its input."""
        totals = (self._hidden, self._weight, self._bias)
        return tuple(
            None if total is None or given is None else total.to(given.dtype)
            for total, given in zip(totals, self._inputs, strict=True)
        )


def _divide_by_temperature(values: Tensor, temperature: float) -> Tensor:
    return values if temperature == 1.0 else values / temperature
