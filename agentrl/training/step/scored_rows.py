"""What is known of trajectories before their loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agentrl.trajectory import Batch


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Everything that rewards, corrections and advantages are made of; detached."""

    rewards: Tensor  # [B, T] the environment's
    response_mask: Tensor  # [B, T] bool
    loss_mask: Tensor  # [B, T] bool, what the filters left
    groups: Tensor  # [B] int64
    samples: Tensor  # [B] int64
    truncated: Tensor  # [B] bool
    rollout_log_probs: Tensor  # [B, T] the engine's
    log_probs: Tensor  # [B, T] those of the weights before the step's updates
    sum_pi_squared: Tensor  # [B, T]
    energy: Tensor  # [B, T]
    hidden_norm_squared: Tensor  # [B, T]
    reference_log_probs: Tensor | None = None  # [B, T]
    full_kl: Tensor | None = None  # [B, T] the exact divergence from the reference
    values: Tensor | None = None  # [B, T] the critic's, before each token
    final_values: Tensor | None = None  # [B] the critic's, after the last token
    greedy_returns: Tensor | None = None  # [B]
    trajectory_energy: Tensor | None = None  # [B]

    @classmethod
    def of(cls, batch: Batch, statistics: dict[str, Tensor], **more: Tensor | None) -> ScoredRows:
        """From a batch and the statistics of its forward."""
        return cls(
            rewards=batch.rewards,
            response_mask=batch.response_mask,
            loss_mask=batch.loss_mask,
            groups=batch.groups,
            samples=batch.samples,
            truncated=batch.truncated,
            rollout_log_probs=batch.rollout_log_probs,
            log_probs=statistics["log_probs"],
            sum_pi_squared=statistics["sum_pi_squared"],
            energy=statistics["energy"],
            hidden_norm_squared=statistics["hidden_norm_squared"],
            **more,
        )

    @property
    def keys(self) -> Tensor:
        """A number for each trajectory [B] that no other of the step has."""
        return (self.groups << 24) + self.samples
