"""What a loss needs beside the forward: rewards with penalties, the rollout correction, and the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce

import torch
from torch import Tensor, nn

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, Advantages, compute_advantages, reward_kl
from agentrl.algorithms.estimators.normalization import Moments
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.rewards import add_at_last_token, overlong_penalty
from agentrl.batch import Batch
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.exchange import Exchange
from agentrl.training.engine.meter import Meter
from agentrl.training.step.correction import Corrector
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_options, needs
from agentrl.training.step.rows import LossRows


class LossRowMaker:
    """Completes the rows of a micro-batch of whole groups or of the whole step. ``beta`` weighs the KL penalty."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Raises SettingsError if the estimator or the correction does not accept these settings."""
        self._settings = settings
        self._estimator = settings.algorithm.estimator
        self._estimator_options = estimator_options(settings)
        self.corrector = Corrector(settings.correction)
        self.needs_exact_energy = "trajectory_energy" in needs(settings).inputs
        self.step_wide = needs(settings).step_wide

    def estimate(
        self, batches: Sequence[Batch], engine: TrainingEngine[nn.Module], *, meter: Meter
    ) -> list[tuple[Tensor, Advantages]]:
        """Rewards [B, T] with penalties and advantages of whole groups in several batches, from rewards alone.

        If the estimator needs the whole step (:attr:`step_wide`), ``batches`` are all of this rank. Then collective.
        """
        inputs = [self._reward_inputs(batch, meter) for batch in batches]
        made = self._over_ranks(batches, inputs, engine) if self.step_wide else self._together(inputs)
        return [(own.rewards, estimate) for own, estimate in zip(inputs, made, strict=True)]

    def with_estimate(self, rows: LossRows, rewards: Tensor, estimate: Advantages, *, meter: Meter) -> LossRows:
        """Complete rows whose advantages were known before their forward."""
        self._measure_kl(rows, meter)
        return replace(rows, rewards=rewards, estimate=estimate)

    def make(self, parts: Sequence[LossRows], *, beta: float, meter: Meter) -> list[LossRows]:
        """Complete the rows of whole groups in several micro-batches."""
        parts = [replace(rows, correction=self.corrector.correct(rows, meter=meter)) for rows in parts]
        inputs = [self._inputs(rows, beta=beta, meter=meter) for rows in parts]
        return [
            replace(rows, rewards=own.rewards, estimate=made)
            for rows, own, made in zip(parts, inputs, self._together(inputs), strict=True)
        ]

    def _together(self, inputs: Sequence[AdvantageInputs]) -> list[Advantages]:
        """The advantages of each micro-batch, of groups that lie in all of them."""
        joined = inputs[0]
        if len(inputs) > 1:
            width = max(own.rewards.shape[1] for own in inputs)
            columns = {
                name: torch.cat([_widened(getattr(own, name), width) for own in inputs])
                for name in vars(inputs[0])
                if getattr(inputs[0], name) is not None
            }
            joined = replace(inputs[0], **columns)
        made = compute_advantages(self._estimator, joined, **self._estimator_options)
        sizes = [len(own.rewards) for own in inputs]
        parts = zip(*(values.split(sizes) for values in vars(made).values()), strict=True)
        return [
            Advantages(**{name: value[:, : own.rewards.shape[1]] for name, value in zip(vars(made), part, strict=True)})
            for own, part in zip(inputs, parts, strict=True)
        ]

    def make_over_ranks(
        self, updates: Sequence[Sequence[LossRows]], engine: TrainingEngine[nn.Module], *, beta: float, meter: Meter
    ) -> list[list[LossRows]]:
        """Complete every micro-batch of each update; groups may span micro-batches and ranks. Collective.

        All trajectories of a group meet on the rank that is their home; an estimator that needs the whole step in one
        call receives everything on rank 0.
        """
        every = [
            replace(rows, correction=self.corrector.correct(rows, meter=meter, normalizer=normalizer))
            for update, normalizer in zip(updates, self._normalizers(updates, engine), strict=True)
            for rows in update
        ]
        inputs = [self._inputs(rows, beta=beta, meter=meter) for rows in every]
        estimates = self._over_ranks([rows.batch for rows in every], inputs, engine)
        made = [
            replace(rows, rewards=own.rewards, estimate=estimate)
            for rows, own, estimate in zip(every, inputs, estimates, strict=True)
        ]
        if every[0].values is not None:
            meter.mean("critic/explained_variance", explained_variance(made, engine), 1.0)
        following = iter(made)
        return [[next(following) for _ in update] for update in updates]

    def _over_ranks(
        self, batches: Sequence[Batch], inputs: Sequence[AdvantageInputs], engine: TrainingEngine[nn.Module]
    ) -> list[Advantages]:
        """The advantages of each micro-batch, computed on the ranks where the groups are whole. Collective.

        Those of batches that are not counted are 0.
        """
        inputs = [own if batch.counted else _without_rows(own) for own, batch in zip(inputs, batches, strict=True)]
        ranks = torch.cat([*(batch.homes for batch in batches if batch.counted), inputs[0].groups[:0]])
        if ESTIMATORS[self._estimator].span == "step":
            ranks = torch.zeros_like(ranks)
        exchange = Exchange([item.response_mask for item in inputs], ranks, group=engine.groups.peers)
        made = compute_advantages(self._estimator, exchange.there(inputs), calls=engine, **self._estimator_options)
        parts = zip(*(exchange.back(values) for values in vars(made).values()), strict=True)
        return [
            Advantages(
                **dict(zip(vars(made), part if batch.counted else [torch.zeros_like(batch.rewards)] * 3, strict=True))
            )
            for part, batch in zip(parts, batches, strict=True)
        ]

    def _normalizers(
        self, updates: Sequence[Sequence[LossRows]], engine: TrainingEngine[nn.Module]
    ) -> Sequence[Tensor | None]:
        """The normalizer of the correction's weights for each update [2], None without one. Collective."""
        if not self.corrector.normalizes:
            return [None] * len(updates)
        sums = torch.zeros(len(updates), 2, dtype=torch.float64, device=engine.device)
        for number, update in enumerate(updates):
            for rows in update:
                if rows.batch.counted:
                    sums[number] += self.corrector.sums(rows)
        return engine.all_reduce(sums).unbind()

    def _inputs(self, rows: LossRows, *, beta: float, meter: Meter) -> AdvantageInputs:
        statistics, after, correction = rows.statistics, rows.final_values, rows.correction
        known = self._reward_inputs(rows.batch, meter)
        self._measure_kl(rows, meter)
        return replace(
            known,
            rewards=self._with_kl_penalty(rows, known.rewards, beta),
            log_probs=statistics.log_probs,
            sum_pi_squared=statistics.sum_pi_squared,
            token_energy=statistics.energy,
            hidden_norm_squared=statistics.hidden_norm_squared,
            importance_weights=None if correction is None else correction.importance_weights,
            loss_mask=known.loss_mask if correction is None else correction.loss_mask,
            trajectory_energy=rows.trajectory_energy,
            values=rows.values,
            bootstrap_values=None if after is None else torch.where(rows.batch.truncated, after, 0.0),
        )

    def _reward_inputs(self, batch: Batch, meter: Meter) -> AdvantageInputs:
        """What is known before a forward."""
        return AdvantageInputs(
            rewards=self._with_length_penalty(batch, meter),
            response_mask=batch.response_mask,
            groups=batch.groups,
            loss_mask=batch.loss_mask,
            greedy_returns=batch.greedy_returns,
            samples=batch.samples,
            branches=batch.branches,
            parents=batch.parents,
            forks=batch.forks,
        )

    def _with_length_penalty(self, batch: Batch, meter: Meter) -> Tensor:
        """Rewards with the soft penalty for overlong responses on the last model token."""
        settings = self._settings.reward
        if not settings.overlong_buffer:
            return batch.rewards
        penalties = settings.overlong_factor * overlong_penalty(
            batch.response_mask.sum(-1), max_length=self._settings.overlong_limit, buffer=settings.overlong_buffer
        )
        counted = len(penalties) * int(batch.counted)
        meter.mean("reward/overlong_penalty", penalties.mean(), counted)
        meter.mean("reward/overlong_share", (penalties < 0).double().mean(), counted)
        # The branches of a rollout share one penalty: the mean of theirs.
        return add_at_last_token(batch.rewards, batch.response_mask, penalties * batch.weights)

    def _measure_kl(self, rows: LossRows, meter: Meter) -> None:
        """Record the mean KL penalty, wherever it is placed."""
        reference, mask = rows.reference_log_probs, rows.batch.response_mask
        if reference is None:
            return
        estimator, tokens = self._settings.kl.resolved_estimator, mask.sum()
        penalty = kl_penalty(rows.log_probs, reference, estimator, mask=mask, full=rows.statistics.full_kl)
        meter.mean("kl/mean", penalty.double().sum() / tokens, tokens * int(rows.batch.counted))

    def _with_kl_penalty(self, rows: LossRows, rewards: Tensor, beta: float) -> Tensor:
        """Rewards with the KL penalty if ``kl.placement`` is reward."""
        reference, mask, settings = rows.reference_log_probs, rows.batch.response_mask, self._settings.kl
        if reference is None or settings.placement == "loss":
            return rewards
        estimator, full = settings.resolved_estimator, rows.statistics.full_kl
        return reward_kl(rewards, rows.log_probs, reference, mask, beta=beta, estimator=estimator, full=full).rewards


def _widened(values: Tensor, width: int) -> Tensor:
    """[b, T] with zeros up to [b, width]; [b] as it is."""
    return values if values.dim() == 1 else torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _without_rows(inputs: AdvantageInputs) -> AdvantageInputs:
    given = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return replace(inputs, **{name: value[:0] for name, value in given.items() if value is not None})


def explained_variance(rows: Sequence[LossRows], engine: TrainingEngine[nn.Module]) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the step's model tokens; 0 if nothing varies. Collective."""

    def spread(values: Sequence[Tensor]) -> Tensor:
        every = [
            Moments.of(item.double(), part.response_mask)
            for item, part in zip(values, rows, strict=True)
            if bool(part.response_mask.any())
        ]
        nothing = Moments.nothing(rows[0].estimated.returns.double())
        return reduce(Moments.merge, every, nothing).over_step(engine).squares

    missed = spread([part.estimated.returns - part.values for part in rows if part.values is not None])
    whole = spread([part.estimated.returns for part in rows])
    return torch.where(whole > 0, 1 - missed / torch.where(whole > 0, whole, 1.0), 0.0)
