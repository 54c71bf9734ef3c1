"""Kernels: token statistics without the logits, exact energies of trajectories. torch and Triton only."""

from agentrl.kernels.backends.sharded import sharded_token_statistics
from agentrl.kernels.backends.triton_backend import triton_obstacle
from agentrl.kernels.divergence import full_kl
from agentrl.kernels.energies import trajectory_energies
from agentrl.kernels.records import KernelInputError, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, Backend, token_statistics

__all__ = [
    "BACKENDS",
    "Backend",
    "KernelInputError",
    "TokenStatistics",
    "full_kl",
    "sharded_token_statistics",
    "token_statistics",
    "trajectory_energies",
    "triton_obstacle",
]
