"""Kernels: token statistics without materialized logits, and exact trajectory energies. Needs only torch and Triton."""

from agentrl.kernels.divergence import full_kl, top_divergence
from agentrl.kernels.exact_energies import trajectory_energies
from agentrl.kernels.records import KernelInputError, Support, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, Backend, reason_triton_unavailable, token_statistics

__all__ = [
    "BACKENDS",
    "Backend",
    "KernelInputError",
    "Support",
    "TokenStatistics",
    "full_kl",
    "reason_triton_unavailable",
    "token_statistics",
    "top_divergence",
    "trajectory_energies",
]
