"""Matrix products of a head and of exact energies, accumulated in float32 or float64 for factors of any dtype.

Half-precision factors are multiplied directly on devices that can return a float32 result (CUDA). Elsewhere slices of
the weight's rows are converted one after another, so that no full-precision copy of the weight is stored.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from agentrl.kernels.softcap import cap_and_temper

_SLICE_ELEMENTS = 1 << 22  # elements of the weight converted at once: 16 MB of float32
_HALVES = (torch.bfloat16, torch.float16)


def factor_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the gradient of the logits enters products: half precision on CUDA, else `dtype`.

    With half-precision inputs on CUDA, products of half-precision factors run in the tensor cores, several times faster
    than in `dtype`, the dtype of sums.
    """
    halves = weight.is_cuda and hidden.dtype == weight.dtype and weight.dtype in _HALVES
    return weight.dtype if halves else dtype


def head_logits(hidden: Tensor, weight: Tensor, out: Tensor, temperature: float = 1.0) -> Tensor:
    """out [R, V] <- hidden [R, D] weight^T / temperature, with weight [V, D] and out in the dtype of sums."""
    if factor_dtype(hidden, weight, out.dtype) != out.dtype:
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


def tempered_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, temperature: float, cap: float | None
) -> Tensor:
    """out [R, V] <- z / temperature, with z = x = hidden weight^T + bias, or z = cap tanh(x / cap) with a cap."""
    divisor = temperature if cap is None else 1.0  # the cap is applied before the temperature
    head_logits(hidden, weight, out, divisor)
    if bias is not None:
        out += bias.to(out.dtype) / divisor
    return out if cap is None else cap_and_temper(out, cap, temperature)


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


def add_head_weight_gradient(gradient: Tensor, hidden: Tensor, total: Tensor) -> None:
    """total [V, D] += gradient^T [V, R] hidden [R, D], all in the dtype of sums."""
    total.addmm_(gradient.t(), hidden)


def add_product(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out [A, C] <- left [A, B] right [B, C], or += if `accumulate`. out has the dtype of sums."""
    if not out.is_cuda:
        product = left.to(out.dtype) @ right.to(out.dtype)
        # Not addmm: on CPUs it may add the terms to `out` one by one, which rounds each time at the scale of `out`.
        if accumulate:
            out += product
        else:
            out.copy_(product)
    elif left.dtype == right.dtype != out.dtype:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(accumulate), out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype), beta=int(accumulate))


def batched_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute left [R, A, B] right [R, B, C] -> [R, A, C], accumulated and returned in `dtype`."""
    if left.dtype != dtype and factor_dtype(left, right, dtype) != dtype:
        return torch.bmm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, _SLICE_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)
