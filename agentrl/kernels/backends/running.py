"""Running sums, also where torch promises deterministic algorithms."""

import torch
from torch import Tensor


def running_sum(values: Tensor) -> Tensor:
    """sum_{j <= k} of the last dimension, on the same device.

    torch has no deterministic running sum of floating numbers on GPUs and raises where one is asked for
    (`torch.use_deterministic_algorithms`): there it is taken on the CPU.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)
