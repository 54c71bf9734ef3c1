"""Kernels: token statistics without materialized logits, and exact trajectory energies. Only torch and Triton."""

from agentrl.kernels.divergence import full_kl, top_divergence
from agentrl.kernels.exact_energies import trajectory_energies
from agentrl.kernels.records import KernelInputError, Support, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, Backend, token_statistics
from agentrl.kernels.triton_backend import reason_triton_unavailable, sharded_token_statistics

__all__ = [
    "BACKENDS",
    "Backend",
    "KernelInputError",
    "Support",
    "TokenStatistics",
    "full_kl",
    "reason_triton_unavailable",
    "sharded_token_statistics",
    "token_statistics",
    "top_divergence",
    "trajectory_energies",
]
