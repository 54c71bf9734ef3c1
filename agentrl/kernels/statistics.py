"""The one entrance to the token statistics; the backends compute the same numbers."""

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
    """Statistics of softmax(z / temperature) at the targets; z = x = hidden head_weight^T + bias, the head's output,
    or with a cap z = cap tanh(x / cap). A model that scales x by s has temperature / s and cap / s here.

    hidden [N, D] and head_weight [V, D] of any floating dtype, targets [N] in [0, V), bias [V] or None. Row n of
    hidden is the state that *predicts* targets[n]: the caller has shifted. Rows that do not count (padding,
    observations) are left out before the call, they are not masked here. Sums are in float32, or in float64 if hidden
    or head_weight is; autocast is off.

    Gradients through `log_probs` and `entropy` with respect to hidden, head_weight and bias are exact; the other
    fields are detached. Backends: `chunked` and `triton` (for GPUs) never hold more than a block of logits;
    `reference` holds them all; `auto` is `triton` on GPUs where it is installed, else `chunked`.

    Raises KernelInputError if the arguments do not fit together.
    """
    check_inputs(hidden, head_weight, targets, temperature, bias)
    check_cap(cap)
    name = automatic_backend(hidden.device) if backend == "auto" else backend
    if name not in BACKENDS:
        raise KernelInputError(f"unknown backend {backend!r}: one of {', '.join(['auto', *BACKENDS])}")
    with torch.autocast(hidden.device.type, enabled=False):
        return BACKENDS[name](hidden, head_weight, targets, temperature, bias, cap)
