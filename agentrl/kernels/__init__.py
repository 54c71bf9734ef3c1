"""Kernels: token statistics without logits, and exact energies of trajectories. torch only."""

from agentrl.kernels.energies import trajectory_energies
from agentrl.kernels.records import KernelInputError, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, token_statistics

__all__ = ["BACKENDS", "KernelInputError", "TokenStatistics", "token_statistics", "trajectory_energies"]
