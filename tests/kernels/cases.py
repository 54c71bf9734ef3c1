"""What tests of the kernels share."""

import pytest
import torch

from agentrl.kernels.statistics import reason_triton_unavailable

FIELDS = ("log_probs", "entropy", "sum_pi_squared", "energy")

obstacle = reason_triton_unavailable(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
needs_triton = pytest.mark.skipif(obstacle is not None, reason=f"here the triton backend {obstacle}")
"""For tests on the device of the mark `on_device`: Triton is installed, and interprets if that is the CPU."""


def seeded(seed: int) -> torch.Generator:
    """A generator for tensors of the test's device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def problem(n: int, d: int, v: int, *, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64):
    """hidden [n, d], weight [v, d], targets [n]."""
    generator = seeded(seed)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, v, (n,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets
