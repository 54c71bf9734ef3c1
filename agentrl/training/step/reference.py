"""The reference policy: a frozen policy that the trained one is held near, and the weight of the penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.algorithms import AdaptiveKL, FixedKL, KLController
from agentrl.models.head import ReferenceHead
from agentrl.models.policy import PolicyModel, scatter_tokens
from agentrl.training.engine.deepspeed_engine import frozen, read_for_training
from agentrl.training.settings import KLSettings
from agentrl.trajectory import Batch
from agentrl.weights.sources import gathered

if TYPE_CHECKING:
    from agentrl.config import Settings


def kl_controller(settings: KLSettings) -> KLController:
    """What weighs the penalty of each step."""
    if settings.controller == "fixed":
        return FixedKL(settings.coefficient)
    return AdaptiveKL(settings.coefficient, target=settings.target, horizon=settings.horizon)


@dataclass(frozen=True, kw_only=True)
class ReferenceReading:
    """What the reference policy says of a batch."""

    log_probs: Tensor  # [B, T] of the sampled tokens, 0 off model tokens
    head: ReferenceHead | None  # for the divergence over the vocabulary, of the model tokens in row-major order


class Reference:
    """A policy that is never updated."""

    def __init__(
        self,
        policy: PolicyModel,
        freeze: Callable[[PolicyModel], Callable[..., Any]],
        *,
        temperature: float,
        over_vocabulary: bool = False,
    ) -> None:
        """``freeze`` gives the policy's forward on this rank's device, perhaps with its parameters sharded.

        ``over_vocabulary`` asks for what the divergence over the whole vocabulary needs: every rank then keeps a whole
        copy of the head, [V, D] beside what is sharded.
        """
        self._logit_map = policy.head.logit_map
        nothing: tuple[Tensor | None, Tensor | None] = (None, None)
        self._weight, self._bias = _copied(policy.head) if over_vocabulary else nothing
        self._forward = freeze(policy)
        self._temperature = temperature
        self.over_vocabulary = over_vocabulary

    @torch.no_grad()
    def read(self, batch: Batch) -> ReferenceReading:
        """One forward. Collective under ZeRO-3."""
        statistics, hidden = self._forward(
            batch.input_ids,
            batch.prompt_lengths,
            batch.response_ids,
            batch.response_mask,
            temperature=self._temperature,
            keep_hidden=self.over_vocabulary,
        )
        log_probs = scatter_tokens(statistics.log_probs, batch.response_mask)
        if self._weight is None or hidden is None:
            return ReferenceReading(log_probs=log_probs, head=None)
        self._weight = self._weight.to(hidden.device, hidden.dtype)
        self._bias = None if self._bias is None else self._bias.to(hidden.device, hidden.dtype)
        head = ReferenceHead(hidden=hidden, weight=self._weight, bias=self._bias, logit_map=self._logit_map)
        return ReferenceReading(log_probs=log_probs, head=head)


def _copied(head: nn.Linear) -> tuple[Tensor, Tensor | None]:
    with gathered(head) as (weight, bias):
        return weight.clone(), None if bias is None else bias.clone()


def reference_path(settings: Settings, start: str) -> str | None:
    """Where the reference policy lies, ``start`` being the policy that training starts from; None without a penalty."""
    if settings.kl.coefficient == 0.0:
        return None
    return settings.kl.reference or start


def read_reference(settings: Settings, path: str) -> Reference:
    """The reference policy on this rank. Raises SettingsError as reading a model does."""
    policy = PolicyModel(
        read_for_training(path, settings.model, settings.training),
        backend=settings.training.head_backend,
        share_prompts=settings.training.share_prompts,
    )
    bfloat16 = settings.model.dtype == "bfloat16"
    return Reference(
        policy,
        lambda module: frozen(module, settings.training, bfloat16=bfloat16),
        temperature=settings.rollout.temperature,
        over_vocabulary=settings.kl.over_vocabulary,
    )
