"""Kernels: token statistics without logits, and exact energies of trajectories. torch only."""

from agentrl.kernels.energies import trajectory_energies
from agentrl.kernels.full_kl import full_kl
from agentrl.kernels.records import KernelInputError, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, token_statistics

__all__ = [
    "BACKENDS",
    "KernelInputError",
    "TokenStatistics",
    "full_kl",
    "token_statistics",
    "trajectory_energies",
]
