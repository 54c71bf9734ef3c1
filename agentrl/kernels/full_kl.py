"""The exact KL divergence of a policy from its reference at every token, without logits [N, V].

Both heads' logits are formed for a block of rows at a time, forward and, again, backward. Extra memory: two blocks of
`_BLOCK_ELEMENTS` and a few pieces of temporaries, and in backward the gradients themselves.

Not guaranteed: second derivatives (`once_differentiable` raises).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from agentrl.kernels.products import add_head_weight_gradient, head_input_gradient, head_logits
from agentrl.kernels.records import KernelInputError, check_inputs, statistics_dtype

_BLOCK_ELEMENTS = 1 << 22  # logits of one matrix product: 16 MB of float32


def full_kl(
    hidden: Tensor,
    head_weight: Tensor,
    reference_hidden: Tensor,
    reference_weight: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    reference_bias: Tensor | None = None,
) -> Tensor:
    """KL(p || p_ref) = sum_v p(v) (ln p(v) - ln p_ref(v)) of every row, [N]: float32, or float64 if an input is.

    p = softmax((hidden head_weight^T + bias) / temperature), p_ref likewise. hidden [N, D], head_weight [V, D],
    reference_hidden [N, E], reference_weight [V, E], biases [V] or None; the two hidden sizes may differ. Where
    p(v) = 0 nothing is added; where only p_ref(v) = 0 the result is inf.

    The gradient with respect to hidden, head_weight and bias is exact, dKL/dz_v = p(v) (ln p(v) - ln p_ref(v) - KL)
    / temperature for the untempered logit z_v; the reference gets none. Rows that do not count are left out before the
    call. Raises KernelInputError if the arguments do not fit together.
    """
    targets = torch.zeros(hidden.shape[:1], dtype=torch.int64, device=hidden.device)
    check_inputs(hidden, head_weight, targets, temperature, bias)
    check_inputs(reference_hidden, reference_weight, targets, temperature, reference_bias)
    if head_weight.shape[0] != reference_weight.shape[0]:
        raise KernelInputError(
            f"the vocabularies differ: head_weight has {head_weight.shape[0]} rows, reference_weight "
            f"{reference_weight.shape[0]}"
        )
    reference = tuple(None if x is None else x.detach() for x in (reference_hidden, reference_weight, reference_bias))
    with torch.autocast(hidden.device.type, enabled=False):
        result: Tensor = _FullKL.apply(hidden, head_weight, bias, *reference, temperature)
    return result


class _FullKL(torch.autograd.Function):
    """(hidden, weight, bias, reference hidden, reference weight, reference bias, temperature) -> [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *others: Any) -> Tensor:
        *tensors, temperature = (hidden, weight, *others)
        ctx.temperature = temperature
        ctx.save_for_backward(*tensors)
        result = hidden.new_empty(hidden.shape[0], dtype=_dtype(tensors))
        for rows, log_p, log_q in _blocks(tensors, temperature):
            result[rows] = _divergence(log_p, log_q)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, bias, *_ = ctx.saved_tensors
        temperature, dtype = ctx.temperature, gradient.dtype
        d_hidden = torch.empty_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, log_p, log_q in _blocks(ctx.saved_tensors, temperature):
                dz = _logit_gradient(log_p, log_q).mul_((gradient[rows] / temperature).unsqueeze(-1))
                if d_hidden is not None:
                    d_hidden[rows] = head_input_gradient(dz, weight)
                if d_weight is not None:
                    add_head_weight_gradient(dz, hidden[rows].to(dtype), d_weight)
                if d_bias is not None:
                    d_bias += dz.sum(0)
        gradients = zip((d_hidden, d_weight, d_bias), (hidden, weight, bias), strict=True)
        return (*(None if d is None else d.to(x.dtype) for d, x in gradients), None, None, None, None)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[R] from ln p and ln q [R, V].

    sum p d = sum (q - p + p d), d = ln p - ln q, as both sum to 1; no term of the second is negative, so nothing
    cancels between them where the policies are close. Near d = 0 a term is p (expm1(-d) + d).
    """
    p, d = log_p.exp(), _log_ratio(log_p, log_q)
    near = d.abs() < 1
    inside = torch.where(near, d, 0.0)
    terms = torch.where(near, p * (torch.expm1(-inside) + inside), log_q.exp() - p + torch.where(p > 0, p * d, 0.0))
    return terms.sum(-1)


def _logit_gradient(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (d - sum p d) [R, V], the gradient of the divergence with respect to the tempered logits of p."""
    p, d = log_p.exp(), _log_ratio(log_p, log_q)
    d = torch.where(p > 0, d, 0.0)
    return p * (d - (p * d).sum(-1, keepdim=True))


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """ln p - ln q; 0 where both are impossible."""
    return torch.where(log_p == -torch.inf, 0.0, log_p - log_q)


def _dtype(tensors: Sequence[Any]) -> torch.dtype:
    """float64 if either policy's statistics are."""
    hidden, weight, _, ref_hidden, ref_weight, _ = tensors
    return torch.promote_types(statistics_dtype(hidden, weight), statistics_dtype(ref_hidden, ref_weight))


def _blocks(tensors: Sequence[Any], temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, ln p [R, V], ln p_ref [R, V]) block by block."""
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = tensors
    dtype = _dtype(tensors)
    total, vocabulary = hidden.shape[0], weight.shape[0]
    size = max(1, min(total, _BLOCK_ELEMENTS // vocabulary))
    buffer = hidden.new_empty((size, vocabulary), dtype=dtype)
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        pair = []
        for states, head, shift in ((hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)):
            z = head_logits(states[rows].to(dtype), head, buffer[: rows.stop - start])
            if shift is not None:
                z += shift.to(dtype)
            pair.append(functional.log_softmax(z / temperature, dim=-1))
        yield rows, pair[0], pair[1]
