"""The trajectories of a micro-batch on their way from a forward to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from agentrl.algorithms import Advantages, Correction
from agentrl.batch import Batch
from agentrl.kernels import TokenStatistics


@dataclass(frozen=True, kw_only=True, eq=False)
class LossRows:
    """A micro-batch with everything that its loss needs beside a forward; all tensors are detached.

    The policy's, the reference's and the critic's forward fill the first fields. ``correction``, ``rewards`` and
    ``estimate`` follow when all trajectories of the groups have them (:class:`.loss_rows.LossRowMaker`).
    """

    batch: Batch
    statistics: TokenStatistics  # each [B, T], zero off model tokens, by the weights before the step's updates
    reference_log_probs: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T] the critic's, before each token
    final_values: Tensor | None = None  # [B] the critic's, after the last token
    trajectory_energy: Tensor | None = None  # [B] exact
    correction: Correction | None = None  # None where none is set
    rewards: Tensor | None = None  # [B, T] with penalties for length and KL
    estimate: Advantages | None = None  # each [B, T]
    selected: Tensor | None = None  # [B, T] bool, where the loss takes tokens over the whole step

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    @property
    def trajectories(self) -> int:
        return self.batch.trajectories

    @property
    def log_probs(self) -> Tensor:
        """[B, T] of the weights before the step's updates."""
        return self.statistics.log_probs

    @property
    def advantages(self) -> Tensor:
        """[B, T]."""
        return self.estimated.advantages

    @property
    def estimated(self) -> Advantages:
        """The estimate, which must be there."""
        assert self.estimate is not None
        return self.estimate

    @cached_property
    def response_mask(self) -> Tensor:
        """[B, T] bool, the model tokens of trajectories that are counted."""
        return self.batch.response_mask & self.batch.counted

    @cached_property
    def loss_mask(self) -> Tensor:
        """[B, T] bool, what filters and correction leave of :attr:`response_mask`."""
        left = self.batch.loss_mask if self.correction is None else self.correction.loss_mask
        return left & self.batch.counted

    @property
    def weights(self) -> Tensor | None:
        """[B, T] of the rollout correction; None if every weight is 1."""
        return None if self.correction is None else self.correction.weights

    @property
    def keys(self) -> Tensor:
        """A number for each trajectory [B] that no other of the step has."""
        return (self.batch.groups << 24) + self.batch.samples
