"""The policy loss of a micro-batch, scaled so that the losses of a step's micro-batches sum to the step's loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from agentrl.algorithms import (
    LOSSES,
    aggregate,
    kl_penalty,
    loss_normalizer,
    policy_loss,
    step_selection,
    token_factors,
)
from agentrl.algorithms.losses.compute import LOG_RATIO_LIMIT
from agentrl.batch import Batch
from agentrl.kernels import TokenStatistics
from agentrl.training.engine.collectives import RowExchange
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.step.objective_settings import ObjectiveSettings, loss_options


class PolicyObjective:
    """Policy loss, entropy bonus, KL penalty and divergence from a teacher under one aggregation."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Resolve the loss.

        Raises SettingsError if the loss is unknown or does not support a setting that differs from its default.
        """
        self._algorithm = settings.algorithm
        self._seed = settings.seed
        self._options = loss_options(settings)
        self._mode = settings.aggregation
        self._length = settings.norm_length if self._mode == "seq_mean_token_sum_norm" else None
        self._kl_estimator = settings.kl.resolved_estimator if settings.kl.in_loss else None
        self._teacher_estimator = settings.teacher.estimator
        self.needs_selection = LOSSES.traits(settings.algorithm.loss).step_wide

    def normalizer(self, tokens: float, sequences: float) -> float | None:
        """Return the loss divisor of an update with ``tokens`` and ``sequences`` over all ranks; None for token_sum."""
        return {"token_mean": tokens, "token_sum": None}.get(self._mode, sequences)

    def normalizer_over_ranks(self, batches: Sequence[Batch], engine: TrainingEngine[nn.Module]) -> float | None:
        """Return :meth:`normalizer` with tokens and sequences counted over all ranks. Collective."""
        modes = ("token_mean", "seq_mean_token_mean")
        counts = [
            math.fsum(
                float(
                    loss_normalizer(batch.trained_mask, mode, batch.weights, batch.problem_weights, batch.path_weights)
                )
                for batch in batches
            )
            for mode in modes
        ]
        total = engine.sum_over_replicas(torch.tensor(counts, dtype=torch.float64, device=engine.device))
        tokens, sequences = total.tolist()
        return self.normalizer(tokens, sequences)

    def loss(
        self,
        statistics: TokenStatistics,
        batch: Batch,
        *,
        normalizer: float | None,
        beta: float,
        teacher_coefficient: float,
        ratio_is_one: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this batch's part of the step's loss, and metrics that are means over the tokens of the loss mask.

        ``statistics``, each [B, T], are connected to the graph. ``ratio_is_one``: ``batch`` was scored with the same
        statistics, so the ratio of the current policy to the policy that scored the batch is 1.

        A penalty that depends on the sampled token is weighted like the policy loss: with ratio = p / p_behaviour,
        E_behaviour[ratio f(y)] = E_p[f(y)] at every prefix. Entropy and exact KL do not depend on the sampled token, so
        a ratio would only add noise, and a truncated ratio would add bias too.
        """
        mask, log_probs = batch.trained_mask, statistics.log_probs
        per_token, metrics = policy_loss(
            self._algorithm.loss,
            log_probs=log_probs,
            old_log_probs=None if ratio_is_one else batch.log_probs,
            advantages=batch.advantages,
            loss_mask=mask,
            response_mask=batch.counted_mask,
            weights=batch.correction_weights,
            selected=batch.selected,
            **self._options,
        )
        value = self._aggregate(per_token, batch, normalizer)
        if self._algorithm.entropy_coefficient:
            bonus = self._aggregate(statistics.entropy, batch, normalizer)
            value = value - self._algorithm.entropy_coefficient * bonus
        for estimator, others, full, coefficient in (
            (self._kl_estimator, batch.reference_log_probs, statistics.full_kl, beta),
            (self._teacher_estimator, batch.teacher_log_probs, statistics.teacher_divergence, teacher_coefficient),
        ):
            if estimator is not None and others is not None:
                ratio = (
                    None
                    if estimator == "full"
                    else _ratio_to_sampling_policy(log_probs, batch, ratio_is_one=ratio_is_one)
                )
                penalty = kl_penalty(log_probs, others, estimator, mask=mask, full=full, ratio=ratio)
                value = value + coefficient * self._aggregate(penalty, batch, normalizer)
        return value, metrics

    def trajectory_loss_factors(self, batch: Batch, normalizer: float | None) -> Tensor:
        """Return the factor [B] of each trajectory's tokens in the policy loss, excluding the correction's weights."""
        return token_factors(
            batch.trained_mask,
            self._mode,
            normalizer=normalizer,
            length=self._length,
            weights=batch.weights,
            problem_weights=batch.problem_weights,
            path_weights=batch.path_weights,
        )

    @torch.no_grad()
    def select_tokens(
        self, log_probs: Sequence[Tensor], batches: Sequence[Batch], engine: TrainingEngine[nn.Module], *, step: int
    ) -> list[Tensor]:
        """Select an update's tokens on rank 0. Returns a mask [B, T] for each micro-batch. Collective.

        ``log_probs`` are computed with the weights at the start of the update.
        """

        def counted(values: Iterable[Tensor]) -> list[Tensor]:
            return [value if part.counted else value[:0] for value, part in zip(values, batches, strict=True)]

        masks = counted(part.trained_mask for part in batches)
        homes = torch.zeros(sum(map(len, masks)), dtype=torch.int64, device=engine.device)
        exchange = RowExchange(masks, homes, group=engine.groups.peers)
        chosen = step_selection(
            self._algorithm.loss,
            log_probs=exchange.send_rows_to_home_ranks(counted(log_probs)),
            old_log_probs=exchange.send_rows_to_home_ranks(counted(part.log_probs for part in batches)),
            advantages=exchange.send_rows_to_home_ranks(counted(part.advantages for part in batches)),
            loss_mask=exchange.send_rows_to_home_ranks(masks),
            trajectory_ids=exchange.send_rows_to_home_ranks(counted(part.trajectory_ids for part in batches)),
            seed=(self._seed << 32) + step,  # the run's seed is below 2^31
            **self._options,
        )
        parts = zip(exchange.return_results_to_senders(chosen), batches, strict=True)
        return [mask if len(mask) else torch.zeros_like(part.loss_mask) for mask, part in parts]

    def _aggregate(self, per_token: Tensor, batch: Batch, normalizer: float | None) -> Tensor:
        return aggregate(
            per_token,
            batch.trained_mask,
            self._mode,
            normalizer=normalizer,
            length=self._length,
            weights=batch.weights.to(per_token),
            problem_weights=batch.problem_weights.to(per_token),
            path_weights=batch.path_weights.to(per_token),
        )


def _ratio_to_sampling_policy(log_probs: Tensor, batch: Batch, *, ratio_is_one: bool) -> Tensor | None:
    """Return the detached ratio [B, T] of the current policy to the sampling policy, or None if every ratio is 1.

    The result is the ratio to the policy before the step, times the weights of the rollout correction. A weight, with
    its bounds, replaces the ratio of the policy before the step to the sampling policy.
    """
    if ratio_is_one:
        return batch.correction_weights
    log_ratio = torch.where(batch.trained_mask, log_probs.detach() - batch.log_probs, 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ratio if batch.correction_weights is None else ratio * batch.correction_weights
