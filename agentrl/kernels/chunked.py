"""Token statistics by blocks of rows, without materializing the logits [N, V] in the forward or backward pass.

A block contains complete rows of the vocabulary, so its softmax needs no running maximum. After the matrix product,
elementwise operations run over pieces of the block that fit into the processor's cache. The backward pass computes the
logits again, unless there are few logits (`KEEP_ELEMENTS`). Extra memory: one block (`BLOCK_ELEMENTS`), three pieces
and, in the backward pass, a bfloat16 copy of the block on GPUs and the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from agentrl.kernels.arithmetic import IMPOSSIBLE, cap_derivative, write_tempered_logits
from agentrl.kernels.gradients import HeadGradientAccumulator, LogitGradientCoefficients, logit_gradient_coefficients
from agentrl.kernels.records import Support, TokenStatistics, statistics_dtype

# Maximum number of logits in one matrix product: 32 MB of float32 on CPUs, and 256 MB on GPUs. The latter is 441 rows
# of 151,936 tokens, enough to use the tensor cores fully.
BLOCK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
# Maximum number of logits in one elementwise operation: 8 MB on CPUs, within the last-level cache, and 64 MB on GPUs.
PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}
KEEP_ELEMENTS = 1 << 23  # ln p of up to this many logits is kept for the backward pass, as recomputing it is slower


def chunked_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    cap: float | None,
    support: Support | None,
) -> TokenStatistics:
    """Compute the statistics of docs/reference/formulas.md 2 by blocks of rows.

    Takes the arguments of `token_statistics`.
    """
    log_probs, entropy, sum_pi_squared, energy = _ChunkedStatistics.apply(
        hidden, head_weight, bias, targets.long(), temperature, cap, support
    )
    norms = hidden.detach().to(log_probs.dtype).square().sum(-1)
    return TokenStatistics(
        log_probs=log_probs, entropy=entropy, sum_pi_squared=sum_pi_squared, energy=energy, hidden_norm_squared=norms
    )


class _ChunkedStatistics(torch.autograd.Function):
    """Autograd function of `chunked_statistics`. Returns log_prob, entropy, sum_pi_squared and energy, [N] each.

    Inputs: hidden [N, D], weight [V, D], bias [V] or None, targets [N], temperature, cap, support.
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
        support: Support | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.cap, ctx.support = temperature, cap, support
        clamp = bias is not None or support is not None  # without these, no logit is -inf
        dtype = statistics_dtype(hidden, weight)
        columns = hidden.new_empty((4, hidden.shape[0]), dtype=dtype)
        kept = None
        small = hidden.shape[0] * weight.shape[0] <= KEEP_ELEMENTS
        keep = any(ctx.needs_input_grad) and small and cap is None  # a cap's slope needs the logits themselves
        for rows, z in _logit_blocks(hidden, weight, bias, temperature, cap, support, dtype, whole=keep):
            for piece, at in [(slice(None), rows)] if keep else _row_slices(z, rows):
                log_p = functional.log_softmax(z[piece], dim=-1)
                slope = None if cap is None else cap_derivative(z[piece], cap, temperature)
                columns[:, at] = _statistics_from_log_probs(log_p, targets[at], clamp=clamp, slope=slope)
                kept = log_p if keep else None
        log_probs, entropy, sum_pi_squared, energy = columns.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, kept, log_probs, entropy)
        ctx.mark_non_differentiable(sum_pi_squared, energy)
        return log_probs.clone(), entropy.clone(), sum_pi_squared, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None, *_: Any) -> Any:
        if log_prob_gradient is None and entropy_gradient is None:
            return (None,) * 7
        hidden, weight, bias, targets, kept, log_probs, entropy = ctx.saved_tensors
        dtype, temperature, cap = log_probs.dtype, ctx.temperature, ctx.cap
        coefficients = logit_gradient_coefficients(log_prob_gradient, entropy_gradient, log_probs, entropy)
        totals = HeadGradientAccumulator((hidden, weight, bias), ctx.needs_input_grad, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            if kept is not None:
                rows = slice(0, hidden.shape[0])
                dz = torch.empty_like(kept)
                _write_gradient(kept, targets, rows, coefficients, out=dz)
                totals.add_logit_gradient(rows, dz, temperature)
            else:
                for rows, z in _logit_blocks(hidden, weight, bias, temperature, cap, ctx.support, dtype):
                    for piece, at in _row_slices(z, rows):
                        log_p = functional.log_softmax(z[piece], dim=-1).clamp_(min=IMPOSSIBLE)
                        slope = None if cap is None else cap_derivative(z[piece], cap, temperature)
                        _write_gradient(log_p, targets[at], at, coefficients, out=z[piece])
                        if slope is not None:
                            z[piece].mul_(slope)
                    totals.add_logit_gradient(rows, z, temperature)
        return (*totals.input_gradients(), None, None, None, None)


def _write_gradient(
    log_p: Tensor, targets: Tensor, at: slice, coefficients: LogitGradientCoefficients, *, out: Tensor
) -> None:
    """Write the logit gradient of the rows `at` to out [R, V]. log_p [R, V] must be finite and is not changed."""
    offset = coefficients.offset[at].unsqueeze(-1)
    if coefficients.slope is None:
        torch.exp(log_p, out=out).mul_(offset)
    else:
        torch.addcmul(offset, log_p, coefficients.slope[at].unsqueeze(-1), out=out)
        out.mul_(log_p.exp())
    out.scatter_(-1, targets.unsqueeze(-1), coefficients.at_target[at].unsqueeze(-1))


def _logit_blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    cap: float | None,
    support: Support | None,
    dtype: torch.dtype,
    *,
    whole: bool = False,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, tempered logits [R, V]) of each block, or of all rows at once. The next block reuses the memory."""
    total, vocabulary = hidden.shape[0], weight.shape[0]
    size = max(1, total if whole else min(total, BLOCK_ELEMENTS[hidden.device.type] // vocabulary))
    buffer = hidden.new_empty((size, vocabulary), dtype=dtype)
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        z = write_tempered_logits(hidden[rows], weight, bias, buffer[: rows.stop - start], temperature, cap)
        yield rows, z if support is None else support.mask_logits(z, rows)


def _row_slices(z: Tensor, rows: slice) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a few rows in pairs: relative to the block z [R, V], and relative to all rows."""
    step = max(1, PIECE_ELEMENTS[z.device.type] // z.shape[1])
    for start in range(0, z.shape[0], step):
        stop = min(start + step, z.shape[0])
        yield slice(start, stop), slice(rows.start + start, rows.start + stop)


def _statistics_from_log_probs(log_p: Tensor, targets: Tensor, *, clamp: bool, slope: Tensor | None = None) -> Tensor:
    """Compute log_prob, entropy, sum_pi_squared and energy [4, R] from ln p [R, V].

    `clamp` replaces -inf in ln p with a finite value, in place. `slope` [R, V], the derivative of the cap, affects only
    the energy. The target is excluded from the sums and added last: if it has nearly all the mass,
    ln p = -log1p(rest / own) and therefore 1 - p keep their relative accuracy.
    """
    index = targets.unsqueeze(-1)
    rough = log_p.gather(-1, index).squeeze(-1)
    if clamp:
        log_p.clamp_(min=IMPOSSIBLE)
    p = log_p.exp().scatter_(-1, index, 0.0)
    own, rest = rough.exp(), p.sum(-1)
    squares = torch.linalg.vector_norm(p, dim=-1).square()
    own_slope: float | Tensor = 1.0
    steep = squares
    if slope is not None:
        own_slope = slope.gather(-1, index).squeeze(-1)  # [R]
        steep = torch.linalg.vector_norm(slope.mul(p), dim=-1).square()
    log_probs = torch.where(rough > -1.0, -torch.log1p(rest / own), rough)
    entropy = -(p.mul_(log_p).sum(-1) + own * rough.clamp(min=IMPOSSIBLE))
    sum_pi_squared = (2 * log_probs).exp() + squares
    energy = torch.expm1(log_probs).mul(own_slope).square() + steep
    return torch.stack([log_probs, entropy, sum_pi_squared, energy])
