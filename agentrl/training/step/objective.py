"""The policy's loss of a micro-batch, such that the parts of a step add up to the step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms import LOSSES, aggregate, kl_penalty, loss_normalizer, policy_loss, step_selection
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.exchange import Exchange
from agentrl.training.step.loss_inputs import LossRows
from agentrl.training.step.objective_options import loss_options
from agentrl.training.step.objective_settings import ObjectiveSettings

# As the losses clamp the logarithm of a ratio.
_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Normalizers:
    """What the loss mask of one update leaves, over all ranks."""

    tokens: int
    sequences: int

    @classmethod
    def over_ranks(cls, targets: Sequence[LossRows], engine: TrainingEngine[Any]) -> Normalizers:
        """Counted. Collective."""
        modes = ("token_mean", "seq_mean_token_mean")
        own = [sum(int(loss_normalizer(part.loss_mask, mode)) for part in targets) for mode in modes]
        tokens, sequences = engine.all_reduce(torch.tensor(own, dtype=torch.int64, device=engine.device)).tolist()
        return cls(tokens=tokens, sequences=sequences)

    def of(self, mode: str) -> int | None:
        """The count that an aggregation divides by; None if by nothing."""
        if mode == "token_sum":
            return None
        return self.tokens if mode == "token_mean" else self.sequences


@dataclass(frozen=True, kw_only=True)
class Loss:
    """``value``: a micro-batch's part of the step's loss. ``metrics``: means over the loss mask's tokens."""

    value: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """What a selection over the whole step looks at."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    keys: Tensor


class PolicyObjective:
    """Policy loss, entropy bonus and KL penalty under one aggregation."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Raises SettingsError if the loss is not known or lacks a setting that was changed."""
        self._algorithm = settings.algorithm
        self._options = loss_options(settings)
        self._mode = settings.aggregation
        self._length = settings.norm_length if self._mode == "seq_mean_token_sum_norm" else None
        self._kl_estimator = settings.kl.resolved_estimator if settings.kl.in_loss else None
        self.selects = LOSSES.traits(settings.algorithm.loss).step_wide

    def loss(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        targets: LossRows,
        normalizers: Normalizers,
        *,
        beta: float,
        fresh: bool,
        selected: Tensor | None = None,
        full_kl: Tensor | None = None,
    ) -> Loss:
        """``log_probs``, ``entropy`` and ``full_kl`` [B, T] carry the graph.

        ``fresh``: they are those that the targets are made of, so every ratio is 1. ``selected``: this micro-batch's
        rows of :meth:`selection`.

        A penalty that is read off the sampled token is weighed as the policy loss is, by what the present policy would
        sample it over what sampled it: with ratio = p / p_behaviour, E_behaviour[ratio f(y)] = E_p[f(y)] at every
        prefix. The entropy and the exact KL take no ratio: given the prefix they do not depend on the sampled token,
        so a ratio would add noise, and a truncated one, whose mean is below 1, a bias.
        """
        mask = targets.loss_mask
        made = policy_loss(
            self._algorithm.loss,
            log_probs=log_probs,
            old_log_probs=None if fresh else targets.log_probs,
            advantages=targets.advantages,
            loss_mask=mask,
            response_mask=targets.response_mask,
            weights=targets.weights,
            selected=selected,
            **self._options,
        )
        value = self._aggregated(made.per_token, mask, normalizers)
        metrics = made.metrics
        if self._algorithm.entropy_coefficient:
            bonus = self._aggregated(entropy, mask, normalizers)
            value = value - self._algorithm.entropy_coefficient * bonus
        if self._kl_estimator is not None and targets.reference_log_probs is not None:
            ratio = None if self._kl_estimator == "full" else _ratio(log_probs, targets, fresh=fresh)
            reference = targets.reference_log_probs
            penalty = kl_penalty(log_probs, reference, self._kl_estimator, mask=mask, full=full_kl, ratio=ratio)
            value = value + beta * self._aggregated(penalty, mask, normalizers)
        return Loss(value=value, metrics=metrics)

    @torch.no_grad()
    def selection(
        self, log_probs: Sequence[Tensor], targets: Sequence[LossRows], engine: TrainingEngine[Any], *, seed: int
    ) -> list[Tensor]:
        """Which tokens of one update the loss selects, on rank 0: [B, T] bool for each micro-batch. Collective.

        ``log_probs`` are those of the weights that the update starts from.
        """
        own = [_candidates(now, part) for now, part in zip(log_probs, targets, strict=True)]
        masks = [item.loss_mask for item in own]
        exchange = Exchange(masks, torch.zeros(sum(map(len, masks)), dtype=torch.int64, device=engine.device))
        whole = exchange.there(own)
        chosen = step_selection(
            self._algorithm.loss,
            log_probs=whole.log_probs,
            old_log_probs=whole.old_log_probs,
            advantages=whole.advantages,
            loss_mask=whole.loss_mask,
            keys=whole.keys,
            seed=seed,
            **self._options,
        )
        parts = zip(exchange.back(chosen), targets, strict=True)
        return [part if len(part) else torch.zeros_like(target.loss_mask) for part, target in parts]

    def _aggregated(self, per_token: Tensor, mask: Tensor, normalizers: Normalizers) -> Tensor:
        normalizer = normalizers.of(self._mode)
        return aggregate(per_token, mask, self._mode, normalizer=normalizer, length=self._length)


def _candidates(log_probs: Tensor, targets: LossRows) -> _Candidates:
    """Without rows for a dummy."""
    rows = len(log_probs) * int(targets.response_mask.any())
    return _Candidates(
        log_probs=log_probs[:rows],
        old_log_probs=targets.log_probs[:rows],
        advantages=targets.advantages[:rows],
        loss_mask=targets.loss_mask[:rows],
        keys=targets.keys[:rows],
    )


def _ratio(log_probs: Tensor, targets: LossRows, *, fresh: bool) -> Tensor | None:
    """Of the present policy to the one that sampled [B, T], detached; None where every ratio is 1.

    From the policy before the step's updates on it is the rollout correction's weight, bounded as the settings say.
    """
    if fresh:
        return targets.weights
    log_ratio = torch.where(targets.loss_mask, log_probs.detach() - targets.log_probs, 0.0)
    ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    return ratio if targets.weights is None else ratio * targets.weights
