"""Running sums that also work with deterministic algorithms in torch."""

import torch
from torch import Tensor


def running_sum(values: Tensor) -> Tensor:
    """Compute sum_{j <= k} over the last dimension, on the same device.

    torch has no deterministic running sum of floating-point numbers on GPUs and raises an error under
    `torch.use_deterministic_algorithms`. In that case the sum is computed on the CPU.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)
