"""The critic of estimator gae: values before the update, and its own update beside the policy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms import aggregate, value_loss
from agentrl.batch import Batch
from agentrl.models.attention import choose_attention
from agentrl.models.policy import ValueModel
from agentrl.training.engine.deepspeed_engine import TrainingEngine, read_for_training
from agentrl.training.engine.groups import rank_groups
from agentrl.training.settings import CriticSettings
from agentrl.training.step.rows import LossRows

if TYPE_CHECKING:
    from agentrl.config import Settings


def open_critic(settings: Settings, *, start: str, updates: int) -> Critic:
    """A critic on this rank, its transformer that of ``critic.path`` or of the policy ``start``."""
    causal_lm = read_for_training(settings.critic.path or start, settings.model, settings.training)
    attention = choose_attention(settings.model.attention, causal_lm.config, dtype=settings.model.dtype)
    engine = TrainingEngine(
        ValueModel(causal_lm, attention=attention, sequence=rank_groups(settings.training).sequence),
        optimizer=settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate}),
        training=settings.training,
        bfloat16=settings.model.dtype == "bfloat16",
        updates=updates,
    )
    return Critic(engine, settings.critic)


class Critic:
    """A value network under its own DeepSpeed engine."""

    def __init__(self, engine: TrainingEngine[ValueModel], settings: CriticSettings) -> None:
        self.engine = engine
        self._clip = settings.clip

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Values before each response token [B, T], and after the last one [B]."""
        values = self._forward(batch)
        return values[:, :-1], values.gather(1, batch.response_lengths[:, None])[:, 0]

    def backward(self, rows: LossRows, *, tokens: int) -> dict[str, Tensor]:
        """Add the gradient of this micro-batch's part of the loss, the mean over the update's ``tokens``.

        Returns metrics, means over the model tokens of ``rows``.
        """
        mask, now = rows.response_mask, self._forward(rows.batch)[:, :-1]
        loss = value_loss(now, rows.estimated.returns, mask, old_values=rows.values, clip=self._clip)
        value = aggregate(loss.per_token, mask, "token_mean", normalizer=tokens)
        self.engine.backward(value * self.engine.world_size)
        return loss.metrics | {"loss": torch.where(mask, loss.per_token.detach(), 0.0).sum() / mask.sum().clamp(min=1)}

    def _forward(self, batch: Batch) -> Tensor:
        values: Tensor = self.engine(batch.row, batch.response_mask.shape[1])
        return values
