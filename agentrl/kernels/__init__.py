"""Kernels: what is computed from hidden states and the head's weight without the logits. torch only."""

from agentrl.kernels.full_kl import full_kl
from agentrl.kernels.records import KernelInputError, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, token_statistics

__all__ = ["BACKENDS", "KernelInputError", "TokenStatistics", "full_kl", "token_statistics"]
