"""Arithmetic shared by several kernels: products with the head, capped logits, running sums.

Logits are soft-capped as z = cap tanh(x / cap) for the head's output x. A scale of the output needs no extra case:
softmax(s x / T) is softmax(x / (T / s)), and z = cap tanh(s x / cap) is s (cap / s) tanh(x / (cap / s)). Temperatures
and caps of the kernels are therefore in units of the head's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def apply_cap_and_temperature(logits: Tensor, cap: float, temperature: float) -> Tensor:
    """Compute cap tanh(x / cap) / T of the head's output x, in place."""
    return logits.div_(cap).tanh_().mul_(cap / temperature)


def cap_derivative(tempered: Tensor, cap: float, temperature: float = 1.0) -> Tensor:
    """Compute dz/dx = 1 - tanh(x / cap)^2 from the result of :func:`apply_cap_and_temperature`.

    The derivative is 0 where that result is -inf.
    """
    return 1 - (tempered * (temperature / cap)).clamp(min=-1.0).square()


_SLICE_ELEMENTS = 1 << 22  # elements of the weight converted at once: 16 MB of float32
_HALVES = (torch.bfloat16, torch.float16)


def logit_gradient_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the logit gradient in matrix products: half precision on CUDA, otherwise `dtype`.

    `dtype` is the accumulation dtype. With half-precision inputs on CUDA, products of half-precision factors run in the
    tensor cores, several times faster than in `dtype`.
    """
    halves = weight.is_cuda and hidden.dtype == weight.dtype and weight.dtype in _HALVES
    return weight.dtype if halves else dtype


def write_head_logits(hidden: Tensor, weight: Tensor, out: Tensor, temperature: float = 1.0) -> Tensor:
    """Write hidden [R, D] weight^T / temperature to out [R, V] in the accumulation dtype, with weight [V, D]."""
    if logit_gradient_dtype(hidden, weight, out.dtype) != out.dtype:
        # Divide afterwards, because hidden / temperature would be rounded to half precision.
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        return out if temperature == 1.0 else out.div_(temperature)
    hidden = hidden.to(out.dtype)
    if temperature != 1.0:
        hidden = hidden / temperature
    if weight.dtype == out.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    for rows in _slices(weight):
        out[:, rows] = hidden @ weight[rows].to(out.dtype).t()
    return out


def write_tempered_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, temperature: float, cap: float | None
) -> Tensor:
    """Write z / temperature to out [R, V], with z = x = hidden weight^T + bias, or z = cap tanh(x / cap) with a cap."""
    divisor = temperature if cap is None else 1.0  # the cap is applied before the temperature
    write_head_logits(hidden, weight, out, divisor)
    if bias is not None:
        out += bias.to(out.dtype) / divisor
    return out if cap is None else apply_cap_and_temperature(out, cap, temperature)


def head_input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Compute gradient [R, V] weight [V, D] -> [R, D] in the gradient's dtype."""
    if weight.dtype == gradient.dtype:
        return gradient @ weight
    if weight.is_cuda:
        return torch.mm(gradient.to(weight.dtype), weight, out_dtype=gradient.dtype)
    result = gradient.new_zeros(gradient.shape[0], weight.shape[1])
    for rows in _slices(weight):
        result.addmm_(gradient[:, rows], weight[rows].to(gradient.dtype))
    return result


def matmul_into(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Write left [A, B] @ right [B, C] to out [A, C], or add to out if `accumulate`. out has the accumulation dtype."""
    if not out.is_cuda:
        product = left.to(out.dtype) @ right.to(out.dtype)
        # Do not use addmm: on CPUs, it may add the terms to `out` one by one, rounding each time at the scale of `out`.
        if accumulate:
            out += product
        else:
            out.copy_(product)
    elif left.dtype == right.dtype != out.dtype:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(accumulate), out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype), beta=int(accumulate))


def batched_matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute left [R, A, B] right [R, B, C] -> [R, A, C], accumulated and returned in `dtype`."""
    if left.dtype != dtype and logit_gradient_dtype(left, right, dtype) != dtype:
        return torch.bmm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, _SLICE_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)


IMPOSSIBLE = -1e4
"""Value in place of ln 0 where 0 * ln 0 must be 0. Its exponential is 0 even in float64."""


def cumulative_sum(values: Tensor) -> Tensor:
    """Compute sum_{j <= k} over the last dimension, on the same device.

    torch has no deterministic running sum of floating-point numbers on GPUs and raises an error under
    `torch.use_deterministic_algorithms`. In that case the sum is computed on the CPU.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)
