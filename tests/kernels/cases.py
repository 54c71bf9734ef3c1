"""What tests of the kernels share."""

import pytest
import torch

from agentrl.kernels.backends.triton_backend import triton_obstacle

FIELDS = ("log_probs", "entropy", "sum_pi_squared", "energy")

obstacle = triton_obstacle(torch.device("cpu"))
needs_triton = pytest.mark.skipif(obstacle is not None, reason=f"on CPU tensors the backend triton {obstacle}")
"""For tests with CPU tensors: Triton is installed and interprets."""


def problem(n: int, d: int, v: int, *, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64):
    """hidden [n, d], weight [v, d], targets [n]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, v, (n,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets
