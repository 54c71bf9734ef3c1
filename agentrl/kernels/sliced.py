"""Token statistics by slices of the vocabulary, for GPUs.

A tile of logits [R, W] belongs to a block of rows and a slice of the vocabulary. One matrix product writes it into a
buffer that all tiles share, and an epilogue (`triton_epilogue`) reads it once. In the forward pass the epilogue updates
the running sums of every row. In the backward pass it replaces the tile with its gradient, a factor of the two products
that follow. Extra memory: one tile and, in the backward pass, its gradient and the float32 gradients of the hidden
states [N, D] and of one slice of the weight.

The running sums of a row (docs/reference/formulas.md 2) are six numbers computed from its raw logits z. The first five
exclude the target:

``TOP``      M, the largest logit so far
``TIES``     number of logits equal to M
``LOWER``    sum of e^((z - M) / T) over logits below M: Z1 = TIES + LOWER, so that ln Z1 is accurate near Z1 = 1
``SQUARES``  Z2 = sum of e^(2 (z - M) / T)
``MOMENT``   Z3 = sum of (z - M) / T e^((z - M) / T)
``TARGET``   the target's logit, 0 before its slice is processed

Capped logits z = cap tanh(x / cap) have a seventh number, which only the energy uses:

``STEEP``    sum of (e^((z - M) / T) dz/dx)^2

Excluding the target keeps the relative accuracy of 1 - p if the target has nearly all the mass. The temperature T
divides differences of logits and never the logits themselves, which would be rounded at their own, larger scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.kernels.arithmetic import (
    IMPOSSIBLE,
    apply_cap_and_temperature,
    cap_derivative,
    logit_gradient_dtype,
    matmul_into,
    write_head_logits,
)
from agentrl.kernels.gradients import logit_gradient_coefficients
from agentrl.kernels.records import TokenStatistics, statistics_dtype

TOP, TIES, LOWER, SQUARES, MOMENT, TARGET, STEEP = range(7)


def statistics_from_sums(sums: Tensor, temperature: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Return (statistics [4, N], normalizers [N, 2]) from the final state [N, 6], or [N, 7] with a cap.

    The statistics are log_prob, entropy, sum_pi_squared and energy. The normalizers b and L satisfy
    ln p(v) = (z_v - b) / T - L.
    """
    top, ties, lower, squares, moment, target, *steep = sums.unbind(-1)
    best = torch.maximum(top, target)
    shift = ((top - best) / temperature).clamp(min=IMPOSSIBLE)  # shift of all tokens except the target
    own_shift = ((target - best) / temperature).clamp(min=IMPOSSIBLE)
    factor, own = shift.exp(), own_shift.exp()
    rest = factor * (ties + lower)
    excess = torch.where(
        target >= top, rest, ties - 1 + lower + own
    )  # mass in addition to that of one largest logit, which is 1
    log_total, total = excess.log1p(), excess + 1
    log_probs = (target - best) / temperature - log_total
    # If the target has much of the mass, ln p = -log1p(rest / own) keeps the relative accuracy of 1 - p.
    log_probs = torch.where(log_probs > -1.0, -torch.log1p(rest / own), log_probs)
    entropy = log_total - (factor * (moment + shift * (ties + lower)) + own * own_shift) / total
    share = (factor / total).square()
    slope = 1.0 if cap is None else cap_derivative(target, cap)
    energy = (log_probs.expm1() * slope).square() + share * (squares if cap is None else steep[0])
    statistics = [log_probs, entropy, (2 * log_probs).exp() + share * squares, energy]
    return torch.stack(statistics), torch.stack([best, log_total], dim=-1)


SLICE = 2048  # tokens of the vocabulary in a tile
# Maximum number of logits in a tile: 64 MB of float32 on GPUs, and 8 MB on CPUs, within the cache.
TILE_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 21}


class TileEpilogue(Protocol):
    """Operations after the matrix product of a tile, as in `triton_epilogue`."""

    accumulate_sums: Callable[..., None]
    write_logit_gradient: Callable[..., None]


def sliced_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    *,
    epilogue: TileEpilogue,
    cap: float | None = None,
) -> TokenStatistics:
    """Compute the statistics of docs/reference/formulas.md, section 2, one vocabulary slice at a time.

    Takes the arguments of `token_statistics`.
    """
    log_probs, entropy, sum_pi_squared, energy = _SlicedStatistics.apply(
        hidden, head_weight, bias, targets.contiguous(), temperature, cap, epilogue
    )
    # Compute the norms in one pass, without a float32 copy of hidden.
    norms = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=log_probs.dtype).square()
    return TokenStatistics(
        log_probs=log_probs, entropy=entropy, sum_pi_squared=sum_pi_squared, energy=energy, hidden_norm_squared=norms
    )


class _SlicedStatistics(torch.autograd.Function):
    """Autograd function of `sliced_statistics`. Returns log_prob, entropy, sum_pi_squared and energy, [N] each.

    Inputs: hidden [N, D], weight [V, D], bias [V] or None, targets [N], temperature, cap, epilogue.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        cap: float | None,
        epilogue: TileEpilogue,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtype = statistics_dtype(hidden, weight)
        # Use a tensor, because Triton passes Python numbers as float32.
        heat = torch.full((), temperature, dtype=dtype, device=hidden.device)
        sums = hidden.new_zeros((hidden.shape[0], 6 if cap is None else 7), dtype=dtype)
        sums[:, TOP] = -torch.inf
        tiles = _Tiles(hidden, weight, bias, dtype, cap=cap)
        for columns, rows in tiles:
            z = tiles.compute_logits(rows, columns)
            own = tiles.bias_for_epilogue(columns), targets[rows], sums[rows]
            epilogue.accumulate_sums(z, *own, heat, start=columns.start, cap=cap)
        (log_probs, entropy, sum_pi_squared, energy), normalisers = statistics_from_sums(sums, heat, cap)
        ctx.heat, ctx.cap, ctx.epilogue = heat, cap, epilogue
        ctx.save_for_backward(hidden, weight, bias, targets, log_probs, entropy, normalisers)
        ctx.mark_non_differentiable(sum_pi_squared, energy)
        return log_probs.clone(), entropy.clone(), sum_pi_squared, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None, *_: Any) -> Any:
        nothing = (None,) * 7
        if log_prob_gradient is None and entropy_gradient is None:
            return nothing
        hidden, weight, bias, targets, log_probs, entropy, normalisers = ctx.saved_tensors
        offset, slope, at_target = logit_gradient_coefficients(log_prob_gradient, entropy_gradient, log_probs, entropy)
        slope = torch.zeros_like(offset) if slope is None else slope
        coefficients = torch.stack([offset, slope, at_target], dim=-1) / ctx.heat
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _TileGradientAccumulator(hidden, weight, bias, ctx.needs_input_grad, coefficients)
            # `tiles` is deleted below, so that its memory is free when the gradients are converted.
            tiles = _Tiles(hidden, weight, bias, log_probs.dtype, gradient=True, cap=ctx.cap)
            _add_tile_gradients(ctx, tiles, targets, normalisers, gradients)
            del tiles
            return (*gradients.input_gradients(), *nothing[3:])


def _add_tile_gradients(
    ctx: Any, tiles: _Tiles, targets: Tensor, normalisers: Tensor, gradients: _TileGradientAccumulator
) -> None:
    """Recompute every tile's logits, and add their contributions to ``gradients``."""
    for columns, rows in tiles:
        z = tiles.compute_logits(rows, columns)
        dz = tiles.gradient_buffer(z)
        given = targets[rows], normalisers[rows], gradients.coefficients[rows]
        bias = tiles.bias_for_epilogue(columns)
        ctx.epilogue.write_logit_gradient(z, bias, *given, ctx.heat, dz, start=columns.start, cap=ctx.cap)
        gradients.add_logit_gradient(rows, columns, dz)


class _Tiles:
    """Tiles of hidden [N, D] times weight [V, D], with a shared buffer for their logits."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        gradient: bool = False,
        cap: float | None = None,
    ) -> None:
        self._hidden, self._weight, self._cap = hidden, weight, cap
        self._bias = None if bias is None else bias.to(dtype).contiguous()
        self._width = min(SLICE, weight.shape[0])
        elements = TILE_ELEMENTS["cuda" if hidden.is_cuda else "cpu"]
        self._height = max(1, min(hidden.shape[0], elements // self._width))
        size = self._height * self._width
        self._buffer = hidden.new_empty(size, dtype=dtype)
        factor = logit_gradient_dtype(hidden, weight, dtype)
        # The gradient overwrites the logits, unless the matrix products require another dtype.
        self._gradient = hidden.new_empty(size, dtype=factor) if gradient and factor != dtype else self._buffer

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield (slice of the vocabulary, block of rows), with all blocks of a slice in succession."""
        rows = list(_slices_of(self._hidden.shape[0], self._height))
        return ((columns, block) for columns in _slices_of(self._weight.shape[0], self._width) for block in rows)

    def bias_for_epilogue(self, columns: slice) -> Tensor | None:
        """Return the bias that the epilogue must add to the result of :meth:`compute_logits`, or None."""
        return None if self._bias is None or self._cap is not None else self._bias[columns]

    def compute_logits(self, rows: slice, columns: slice) -> Tensor:
        """Compute the contiguous logits [R, W] of a tile without temperature, overwriting the previous tile.

        Capped logits include the bias, because the cap is applied after the bias. Uncapped logits do not include it.
        """
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        out = self._buffer[: shape[0] * shape[1]].view(shape)
        write_head_logits(self._hidden[rows], self._weight[columns], out)
        if self._cap is None:
            return out
        if self._bias is not None:
            out += self._bias[columns]
        return apply_cap_and_temperature(out, self._cap, 1.0)

    def gradient_buffer(self, logits: Tensor) -> Tensor:
        """Return a buffer for a tile's gradient: the logits' buffer, unless products need a different dtype."""
        return self._gradient[: logits.numel()].view(logits.shape)


class _TileGradientAccumulator:
    """Gradients of hidden, weight and bias, accumulated tile by tile; None if not needed.

    `coefficients` are the constructor's coefficients, multiplied by a power of two if gradients of logits are rounded
    to float16. The power shifts them to the middle of float16's range, because values of 2^-24 and below would be lost.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        coefficients: Tensor,
    ) -> None:
        dtype = coefficients.dtype
        self._inputs = hidden, weight, bias
        self._scale = None
        self.coefficients = coefficients
        if hidden.shape[0] and logit_gradient_dtype(hidden, weight, dtype) == torch.float16:
            self._scale = _gradient_scale_for_float16(coefficients)
            self.coefficients = coefficients * self._scale
        self._hidden = hidden.new_zeros(hidden.shape, dtype=dtype) if wanted[0] else None
        self._weight = torch.zeros_like(weight) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and wanted[2] else None
        self._slice = None
        if wanted[1] and weight.dtype != dtype:
            self._slice = hidden.new_empty((min(SLICE, weight.shape[0]), weight.shape[1]), dtype=dtype)

    def add_logit_gradient(self, rows: slice, columns: slice, dz: Tensor) -> None:
        """Add dz [R, W], the scaled gradient with respect to a tile's logits.

        The slices, and the blocks of rows of each slice, must be added in order.
        """
        hidden, weight, _ = self._inputs
        if self._hidden is not None:
            matmul_into(dz, weight[columns], self._hidden[rows], accumulate=columns.start > 0)
        if self._weight is not None:
            total = self._weight[columns] if self._slice is None else self._slice[: columns.stop - columns.start]
            matmul_into(dz.t(), hidden[rows], total, accumulate=rows.start > 0)
            if rows.stop == hidden.shape[0]:  # the last block of rows of this slice
                self._undo_scale(total)
                if self._slice is not None:
                    self._weight[columns] = total
        if self._bias is not None:
            self._bias[columns] += dz.sum(0, dtype=self._bias.dtype)

    def input_gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of (hidden, weight, bias), each in the dtype of its input."""
        hidden, _, bias = self._inputs
        if self._hidden is not None:
            self._hidden = self._undo_scale(self._hidden).to(hidden.dtype)
        if self._bias is not None and bias is not None:
            self._bias = self._undo_scale(self._bias).to(bias.dtype)
        return self._hidden, self._weight, self._bias

    def _undo_scale(self, total: Tensor) -> Tensor:
        return total if self._scale is None else total.div_(self._scale)


def _gradient_scale_for_float16(coefficients: Tensor) -> Tensor:
    """Return a scalar tensor, the power of two that scales the largest absolute logit gradient to at most 2^15.

    p |offset + slope ln p| <= |offset| + |slope|, because p |ln p| <= 1/e.
    """
    offset, slope, at_target = coefficients.abs().unbind(-1)
    bounds = torch.maximum(offset + slope, at_target)
    _, exponent = torch.frexp(torch.where(bounds.isfinite(), bounds, 0.0).amax())
    return torch.ldexp(torch.ones_like(bounds[0]), (15 - exponent).clamp(max=100))


def _slices_of(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
