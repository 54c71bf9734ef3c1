"""Exact divergence of a policy from a frozen policy at every token, without materializing the logits [N, V].

The logits of both heads are computed for one block of rows at a time, and again in the backward pass. Elementwise
operations then run over pieces of the block. Extra memory: two blocks of `_BLOCK_ELEMENTS`, about ten pieces and, in
the backward pass, the gradients.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from agentrl.kernels.arithmetic import cap_derivative, write_tempered_logits
from agentrl.kernels.gradients import HeadGradientAccumulator
from agentrl.kernels.records import KernelInputError, Support, check_cap, check_head_inputs, statistics_dtype

_BLOCK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}  # maximum number of logits in a product: 32 and 256 MB of float32
_PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}  # maximum number of logits in an elementwise operation


def full_kl(
    hidden: Tensor,
    head_weight: Tensor,
    reference_hidden: Tensor,
    reference_weight: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    reference_bias: Tensor | None = None,
    cap: float | None = None,
    reference_temperature: float | None = None,
    reference_cap: float | None = None,
    support: Support | None = None,
    beta: float = 1.0,
) -> Tensor:
    """Compute KL(p || p_ref) = sum_v p(v) (ln p(v) - ln p_ref(v)) [N] of every row, in float32 or float64.

    With ``beta`` = 0, compute KL(p_ref || p); with 0 < beta < 1, the generalized Jensen-Shannon divergence
    beta KL(p_ref || m) + (1 - beta) KL(p || m) of m = beta p_ref + (1 - beta) p (docs/reference/formulas.md 11).

    p = softmax(z / temperature) with z = x = hidden head_weight^T + bias, or z = cap tanh(x / cap) with a cap. p_ref is
    defined in the same way, with its own temperature (default: the same) and cap. hidden [N, D], head_weight [V, D],
    reference_hidden [N, E], reference_weight [V, E], biases [V] or None. The two hidden sizes may differ. A term with
    p(v) = 0 is 0. With beta = 1, the result is inf if p_ref(v) = 0 < p(v) for any v; with beta = 0, if p(v) = 0 <
    p_ref(v). The result is float64 if any input is. A `support` restricts both distributions of a row to the same set
    and renormalizes them.

    The gradient with respect to hidden, head_weight and bias is exact. For example, dKL(p || p_ref)/dx_v =
    p(v) (ln p(v) - ln p_ref(v) - KL) dz_v/dx_v / temperature for the head's output x_v. The reference receives no
    gradient. Select the rows before the call; there is no mask. Raises KernelInputError if the arguments do not fit
    together.
    """
    targets = torch.zeros(hidden.shape[:1], dtype=torch.int64, device=hidden.device)
    check_head_inputs(hidden, head_weight, targets, temperature, bias)
    other_temperature = temperature if reference_temperature is None else reference_temperature
    check_head_inputs(reference_hidden, reference_weight, targets, other_temperature, reference_bias)
    check_cap(cap)
    check_cap(reference_cap)
    if head_weight.shape[0] != reference_weight.shape[0]:
        raise KernelInputError(
            f"the vocabularies differ: head_weight has {head_weight.shape[0]} rows, reference_weight "
            f"{reference_weight.shape[0]}"
        )
    if not 0 <= beta <= 1:
        raise KernelInputError(f"beta must be between 0 and 1; got {beta}")
    reference = tuple(None if x is None else x.detach() for x in (reference_hidden, reference_weight, reference_bias))
    with torch.autocast(hidden.device.type, enabled=False):
        maps = ((temperature, cap), (other_temperature, reference_cap))
        result: Tensor = _FullKL.apply(hidden, head_weight, bias, *reference, maps, support, beta)
    return result


def top_divergence(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    reference_log_probs: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    cap: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """Compute the divergence of :func:`full_kl` [N] over K tokens of each row, with all other tokens merged into one.

    ``ids`` [N, K] are distinct tokens with ``reference_log_probs`` [N, K]. ``log_probs`` [N] are the policy's
    log-probabilities of ``targets`` [N], from :func:`.token_statistics`, and connected to the graph. Other arguments
    and the gradient are as in :func:`full_kl`. The result is at most the divergence over the vocabulary
    (docs/reference/formulas.md 11).
    """
    chosen = torch.cat([targets[:, None], ids], dim=1).long()
    with torch.autocast(hidden.device.type, enabled=False):
        output: Tensor = _HeadOutputsAtIds.apply(hidden, head_weight, chosen, log_probs.dtype)
        output = output if bias is None else output + bias[chosen].to(output.dtype)
        z = (output if cap is None else cap * torch.tanh(output / cap)) / temperature
        log_p = log_probs[:, None] + z[:, 1:] - z[:, :1]
        return _divergence_by_row(
            _append_remaining_log_prob(log_p), _append_remaining_log_prob(reference_log_probs.detach().to(log_p)), beta
        )


class _HeadOutputsAtIds(torch.autograd.Function):
    """Autograd function of the head's outputs hidden . weight[ids] [N, K], computed one block of rows at a time.

    Inputs: hidden [N, D], weight [V, D], ids [N, K] and the dtype of the outputs.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        result = hidden.new_empty(ids.shape, dtype=dtype)
        for rows in _row_slices(ids, width=ids.shape[1] * hidden.shape[1]):
            result[rows] = torch.einsum("nd,nkd->nk", hidden[rows].to(dtype), weight[ids[rows]].to(dtype))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, ids = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        # Skip the gradient of a frozen head, which would be the largest tensor of this method.
        to_weight = torch.zeros_like(weight, dtype=gradient.dtype) if ctx.needs_input_grad[1] else None
        for rows in _row_slices(ids, width=ids.shape[1] * hidden.shape[1]):
            own, states = gradient[rows], hidden[rows].to(gradient.dtype)
            to_hidden[rows] = torch.einsum("nk,nkd->nd", own, weight[ids[rows]].to(gradient.dtype)).to(hidden.dtype)
            if to_weight is not None:
                to_weight.index_add_(0, ids[rows].flatten(), (own[..., None] * states[:, None]).flatten(0, 1))
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None


def _append_remaining_log_prob(log_probs: Tensor) -> Tensor:
    """Append the logarithm of the remaining probability, which is clamped to at least 1e-6, to ln p [N, K]."""
    rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([log_probs, rest], dim=-1)


class _FullKL(torch.autograd.Function):
    """Autograd function of :func:`full_kl`. Returns the divergence [N].

    Inputs: hidden, weight and bias of the policy and of the reference, then maps, support and beta. ``maps`` contains
    (temperature, cap) of the policy and of the reference.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *others: Any) -> Tensor:
        tensors, (ctx.maps, ctx.support, ctx.beta) = (hidden, weight, *others[:-3]), others[-3:]
        ctx.save_for_backward(*tensors)
        result = hidden.new_empty(hidden.shape[0], dtype=_accumulation_dtype(tensors))
        for rows, z, reference in _paired_logit_blocks(tensors, ctx.maps, ctx.support):
            for piece in _row_slices(z):
                log_p, log_q = functional.log_softmax(z[piece], -1), functional.log_softmax(reference[piece], -1)
                result[rows][piece] = _divergence_by_row(log_p, log_q, ctx.beta)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, bias, *_ = ctx.saved_tensors
        (temperature, cap), dtype = ctx.maps[0], gradient.dtype
        totals = HeadGradientAccumulator((hidden, weight, bias), ctx.needs_input_grad, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            scale = (gradient / temperature).unsqueeze(-1)
            for rows, dz, reference in _paired_logit_blocks(ctx.saved_tensors, ctx.maps, ctx.support):
                for piece in _row_slices(dz):
                    log_p, log_q = functional.log_softmax(dz[piece], -1), functional.log_softmax(reference[piece], -1)
                    slope = 1.0 if cap is None else cap_derivative(dz[piece], cap, temperature)
                    torch.mul(
                        _divergence_logit_gradient(log_p, log_q, ctx.beta), scale[rows][piece], out=dz[piece]
                    ).mul_(slope)
                totals.add_logit_gradient(rows, dz)
        return (*totals.input_gradients(), None, None, None, None, None, None)


def _divergence_by_row(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Compute the divergence [R] of :func:`full_kl` from ln p and ln p_ref [R, V]."""
    if beta == 1:
        return _kl_by_row(log_p, log_q)
    if beta == 0:
        return _kl_by_row(log_q, log_p)
    log_m = _log_mixture(log_p, log_q, beta)
    return beta * _kl_by_row(log_q, log_m) + (1 - beta) * _kl_by_row(log_p, log_m)


def _divergence_logit_gradient(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Compute the gradient [R, V] of :func:`_divergence_by_row` with respect to the tempered logits of p."""
    if beta == 1:
        return _kl_logit_gradient(log_p, log_q)
    if beta == 0:
        return log_p.exp() - log_q.exp()
    return (1 - beta) * _kl_logit_gradient(log_p, _log_mixture(log_p, log_q, beta))


def _log_mixture(log_p: Tensor, log_q: Tensor, weight_of_q: float) -> Tensor:
    """Compute ln(w q + (1 - w) p) with w = ``weight_of_q``."""
    return torch.logaddexp(log_q + math.log(weight_of_q), log_p + math.log1p(-weight_of_q))


def _kl_by_row(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p || q) [R] from ln p and ln q [R, V].

    sum p d with d = ln p - ln q equals sum (q - p + p d), because p and q both sum to 1. No term of the second form is
    negative, so terms do not cancel if the policies are close. Near d = 0 a term is computed as p (expm1(-d) + d).
    """
    p, d = log_p.exp(), _log_ratio(log_p, log_q)
    near = (d.abs() < 1) & (log_p != -torch.inf)
    inside = torch.where(near, d, 0.0)
    terms = torch.where(near, p * (torch.expm1(-inside) + inside), log_q.exp() - p + torch.where(p > 0, p * d, 0.0))
    return terms.sum(-1)


def _kl_logit_gradient(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the gradient p (d - sum p d) [R, V] of KL(p || q) with respect to the tempered logits of p."""
    p, d = log_p.exp(), _log_ratio(log_p, log_q)
    d = torch.where(p > 0, d, 0.0)
    return p * (d - (p * d).sum(-1, keepdim=True))


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute ln p - ln q, or 0 if p is 0."""
    return torch.where(log_p == -torch.inf, 0.0, log_p - log_q)


def _accumulation_dtype(tensors: Sequence[Any]) -> torch.dtype:
    """Return float64 if the statistics of either policy are float64, otherwise float32."""
    hidden, weight, _, ref_hidden, ref_weight, _ = tensors
    return torch.promote_types(statistics_dtype(hidden, weight), statistics_dtype(ref_hidden, ref_weight))


def _paired_logit_blocks(
    tensors: Sequence[Any], maps: Sequence[tuple[float, float | None]], support: Support | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, tempered logits [R, V], reference logits) of each block. The next block reuses the memory."""
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = tensors
    dtype = _accumulation_dtype(tensors)
    total, vocabulary = hidden.shape[0], weight.shape[0]
    size = max(1, min(total, _BLOCK_ELEMENTS[hidden.device.type] // vocabulary))
    buffers = hidden.new_empty((2, size, vocabulary), dtype=dtype)
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        own, other = buffers[:, : rows.stop - start]
        sides = ((hidden, weight, bias, own), (ref_hidden, ref_weight, ref_bias, other))
        for (states, head, shift, out), (temperature, cap) in zip(sides, maps, strict=True):
            write_tempered_logits(states[rows], head, shift, out, temperature, cap)
            if support is not None:
                support.mask_logits(out, rows)
        yield rows, own, other


def _row_slices(block: Tensor, width: int | None = None) -> Iterator[slice]:
    """Yield slices of a few rows of the block [R, V], for operations with ``width`` elements per row (default: V)."""
    step = max(1, _PIECE_ELEMENTS[block.device.type] // (width or block.shape[1]))
    for start in range(0, block.shape[0], step):
        yield slice(start, start + step)
