"""Selection of the backend that computes token statistics. All backends compute the same numbers."""

from typing import Literal

import torch
from torch import Tensor

from agentrl.kernels.backends.chunked import chunked_statistics
from agentrl.kernels.backends.reference import reference_statistics
from agentrl.kernels.backends.triton_backend import automatic_backend, triton_statistics
from agentrl.kernels.records import KernelInputError, TokenStatistics, check_cap, check_inputs

Backend = Literal["auto", "reference", "chunked", "triton"]
BACKENDS = {"reference": reference_statistics, "chunked": chunked_statistics, "triton": triton_statistics}


def token_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    backend: str = "auto",
    bias: Tensor | None = None,
    cap: float | None = None,
) -> TokenStatistics:
    """Compute statistics of softmax(z / temperature) at the targets.

    z = x = hidden head_weight^T + bias, the head's output, or z = cap tanh(x / cap) with a cap. For a model that scales
    x by s, pass temperature / s and cap / s.

    hidden [N, D] and head_weight [V, D] of any floating dtype, targets [N] in [0, V), bias [V] or None. Row n of hidden
    is the state that *predicts* targets[n], so the caller must shift. Select the rows before the call: padding and
    observations are not masked here. Sums are in float32, or in float64 if hidden or head_weight is. Autocast is off.

    Gradients through `log_probs` and `entropy` with respect to hidden, head_weight and bias are exact. The other fields
    are detached. The backends `chunked` and `triton` (for GPUs) store at most one block of logits; `reference` stores
    all of them. `auto` selects `triton` on GPUs if it is installed, otherwise `chunked`.

    Raises KernelInputError if the arguments do not fit together.
    """
    check_inputs(hidden, head_weight, targets, temperature, bias)
    check_cap(cap)
    name = automatic_backend(hidden.device) if backend == "auto" else backend
    if name not in BACKENDS:
        raise KernelInputError(f"unknown backend {backend!r}: one of {', '.join(['auto', *BACKENDS])}")
    with torch.autocast(hidden.device.type, enabled=False):
        return BACKENDS[name](hidden, head_weight, targets, temperature, bias, cap)
