"""The reference policy: a frozen policy that the trained one is held near, and the weight of the penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.algorithms import AdaptiveKL, FixedKL, KLController
from agentrl.models.loading import read_model
from agentrl.models.policy import PolicyModel, scatter_tokens
from agentrl.training.deepspeed_engine import frozen
from agentrl.training.settings import KLSettings
from agentrl.trajectory import Batch

if TYPE_CHECKING:
    from agentrl.config import Settings


def kl_controller(settings: KLSettings) -> KLController:
    """What weighs the penalty of each step."""
    if settings.controller == "fixed":
        return FixedKL(settings.coefficient)
    return AdaptiveKL(settings.coefficient, target=settings.target, horizon=settings.horizon)


class Reference:
    """Log-probabilities of a policy that is never updated."""

    def __init__(self, forward: Callable[..., Any], *, temperature: float) -> None:
        """``forward`` is that of a frozen :class:`PolicyModel`."""
        self._forward = forward
        self._temperature = temperature

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """[B, T] of the sampled tokens, 0 off model tokens. Collective under ZeRO-3."""
        statistics, _ = self._forward(
            batch.input_ids,
            batch.prompt_lengths,
            batch.response_ids,
            batch.response_mask,
            temperature=self._temperature,
        )
        return scatter_tokens(statistics.log_probs, batch.response_mask)


def reference_path(settings: Settings, start: str) -> str | None:
    """Where the reference policy lies, ``start`` being the policy that training starts from; None without a penalty."""
    if settings.kl.coefficient == 0.0:
        return None
    return settings.kl.reference or start


def read_reference(settings: Settings, path: str) -> Reference:
    """The reference policy on this rank. Raises SettingsError as reading a model does."""
    policy = PolicyModel(
        read_model(path, settings.model),
        backend=settings.training.head_backend,
        share_prompts=settings.training.share_prompts,
    )
    forward = frozen(policy, zero_stage=settings.training.zero_stage, bfloat16=settings.model.dtype == "bfloat16")
    return Reference(forward, temperature=settings.rollout.temperature)
