"""The rows of a micro-batch on their way to the loss: scored by one forward, then with corrections and advantages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from agentrl.algorithms import Correction
from agentrl.kernels import TokenStatistics
from agentrl.trajectory import Batch


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Rows with everything that rewards, corrections and advantages are made of; detached."""

    batch: Batch
    statistics: TokenStatistics  # each [B, T], zero off model tokens, by the weights before the step's updates
    counted: bool = True  # otherwise they take part in collectives and weigh nothing in loss and metrics
    reference_log_probs: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T] the critic's, before each token
    final_values: Tensor | None = None  # [B] the critic's, after the last token
    greedy_returns: Tensor | None = None  # [B]
    trajectory_energy: Tensor | None = None  # [B]

    @property
    def log_probs(self) -> Tensor:
        """[B, T] of the weights before the step's updates."""
        return self.statistics.log_probs

    @property
    def keys(self) -> Tensor:
        """A number for each trajectory [B] that no other of the step has."""
        return (self.batch.groups << 24) + self.batch.samples


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """Scored rows with what their loss needs beside a forward; detached. ``correction`` is None where none is set."""

    scored: ScoredRows
    correction: Correction | None
    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]
    baselines: Tensor  # [B, T]
    rewards: Tensor  # [B, T] with penalties for length and KL
    selected: Tensor | None = None  # [B, T] bool, where the loss takes tokens over the whole step

    @cached_property
    def response_mask(self) -> Tensor:
        """[B, T] bool, the model tokens of rows that are counted."""
        return self.scored.batch.response_mask & self.scored.counted

    @cached_property
    def loss_mask(self) -> Tensor:
        """[B, T] bool, what filters and correction leave of :attr:`response_mask`."""
        left = self.scored.batch.loss_mask if self.correction is None else self.correction.loss_mask
        return left & self.scored.counted

    @property
    def weights(self) -> Tensor | None:
        """[B, T] of the rollout correction; None if every weight is 1."""
        return None if self.correction is None else self.correction.weights

    @property
    def lengths(self) -> list[int]:
        """Prompt and response tokens of each row."""
        batch = self.scored.batch
        return [int(length) for length in (batch.prompt_lengths + batch.response_lengths).tolist()]
