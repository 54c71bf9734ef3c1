"""Kernels: what is computed from hidden states and the head's weight without the logits. torch only."""

from agentrl.kernels.records import KernelInputError, TokenStatistics
from agentrl.kernels.statistics import BACKENDS, token_statistics

__all__ = ["BACKENDS", "KernelInputError", "TokenStatistics", "token_statistics"]
