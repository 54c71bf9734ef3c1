"""Exact squared gradient norms of whole trajectories, all rows of a batch in one forward and one backward."""

from agentrl.kernels.energies.one_pass import trajectory_energies

__all__ = ["trajectory_energies"]
