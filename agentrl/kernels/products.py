"""The three matrix products of a language-model head, accumulated in float32 (float64) whatever the weight's dtype.

A half-precision weight is multiplied as it is where the device gives a float32 result (CUDA); elsewhere slices of its
rows are converted one after another, so that no full-precision copy of it ever exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_SLICE_ELEMENTS = 1 << 22  # of the weight converted at once: 16 MB of float32


def head_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """out [R, V] <- hidden [R, D] weight^T, weight [V, D]; hidden and out in the accumulation dtype."""
    if weight.dtype == out.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    if weight.is_cuda:
        return out.copy_(torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=out.dtype))
    for rows in _slices(weight):
        out[:, rows] = hidden @ weight[rows].to(out.dtype).t()
    return out


def head_input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient [R, V] weight [V, D] -> [R, D] in the gradient's dtype."""
    if weight.dtype == gradient.dtype:
        return gradient @ weight
    if weight.is_cuda:
        return torch.mm(gradient.to(weight.dtype), weight, out_dtype=gradient.dtype)
    result = gradient.new_zeros(gradient.shape[0], weight.shape[1])
    for rows in _slices(weight):
        result.addmm_(gradient[:, rows], weight[rows].to(gradient.dtype))
    return result


def add_head_weight_gradient(gradient: Tensor, hidden: Tensor, total: Tensor) -> None:
    """total [V, D] += gradient^T [V, R] hidden [R, D], all in the accumulation dtype."""
    total.addmm_(gradient.t(), hidden)


def _slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, _SLICE_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)
