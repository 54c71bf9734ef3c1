"""Completion of batches for the loss: rollout correction, rewards with penalties, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn

from agentrl.algorithms import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    Correction,
    compute_advantages,
    correction_weight_sums,
    reward_kl,
    rollout_correction,
)
from agentrl.algorithms.advantages import Moments
from agentrl.algorithms.rewards import add_at_last_token, overlong_penalty
from agentrl.batch import Batch
from agentrl.training.engine.collectives import MetricAccumulator, RowExchange, concatenate_rows
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.settings import CorrectionSettings
from agentrl.training.step.diagnostics import record_algorithm_metrics
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_options, estimator_requirements

# Metrics of the correction that are means over trajectories instead of tokens.
_MEANS_OVER_TRAJECTORIES = ("train_perplexity", "rollout_perplexity")
# Metrics of the correction that are not recorded here. ``ess`` is computed from other metrics at the end of a step
# (effective_sample_size_metrics), and policy/log_ppl_gap is always recorded.
_OMITTED = ("tokens", "trajectories", "ess", "log_ppl_gap")


class RolloutCorrector:
    """Applies the configured rollout correction to a batch."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self._active = settings.active
        self._options = settings.options
        self.self_normalizes = settings.self_normalize

    def correct(self, batch: Batch, *, meter: MetricAccumulator, normalizer: Tensor | None = None) -> Correction | None:
        """Compute the batch's weights and loss mask, or return None if no correction is set.

        ``normalizer`` is the sum of :meth:`normalizer_sums` over one update; without ``normalizer``, this batch is
        treated as a whole update.
        """
        if not self._active:
            return None
        correction = self._rollout_correction(batch, normalizer=normalizer)
        _record_metrics(correction, batch, meter)
        return correction

    def normalizer_sums(self, batch: Batch) -> Tensor:
        """Return the batch's contribution [2] to an update's normalizer."""
        return correction_weight_sums(
            batch.log_probs, batch.rollout_log_probs, batch.response_mask, loss_mask=batch.loss_mask, **self._options
        )

    def energy_weights(self, batch: Batch) -> Tensor:
        """Return energy weights [B, T]. They are not normalized, because a group may span micro-batches."""
        if not self._active:
            return batch.loss_mask.to(batch.log_probs.dtype)
        return self._rollout_correction(batch, self_normalize=False).importance_weights

    def _rollout_correction(self, batch: Batch, **changed: object) -> Correction:
        return rollout_correction(
            batch.log_probs,
            batch.rollout_log_probs,
            batch.response_mask,
            loss_mask=batch.loss_mask,
            **(self._options | changed),
        )


def effective_sample_size_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Compute ``correction/ess`` from the step's means: (sum rho)^2 / (n sum rho^2), with mean rho = k3 - k1 + 1."""
    if "correction/chi2" not in metrics:
        return {}
    mean = metrics["correction/kl_k3"] - metrics["correction/kl_k1"] + 1
    return {"correction/ess": mean**2 / (metrics["correction/chi2"] + 1)}


def _record_metrics(correction: Correction, batch: Batch, meter: MetricAccumulator) -> None:
    mask = batch.response_mask
    tokens = mask.sum()
    weights = {
        **dict.fromkeys(_MEANS_OVER_TRAJECTORIES, mask.any(-1).sum()),
        "masked_fraction": batch.loss_mask.sum(),
        "weight_mean": correction.loss_mask.sum(),
    }
    for name, value in correction.metrics.items():
        if name not in _OMITTED:
            weight = weights.get(name, tokens) * int(batch.counted)
            record_algorithm_metrics(meter, "correction", {name: value}, weight)


class BatchCompleter:
    """Adds rewards with penalties, advantages and rollout corrections to scored batches.

    The argument ``beta`` is the coefficient of the KL penalty.
    """

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Resolve the options. Raises SettingsError if the estimator or the correction does not accept them."""
        self._settings = settings
        self._estimator = settings.algorithm.estimator
        self._estimator_options = estimator_options(settings)
        self.corrector = RolloutCorrector(settings.correction)
        self.needs_exact_energy = "trajectory_energy" in estimator_requirements(settings).inputs
        self.step_wide = estimator_requirements(settings).step_wide

    def add_advantages_before_forward(
        self, batches: Sequence[Batch], engine: TrainingEngine[nn.Module], *, meter: MetricAccumulator
    ) -> list[Batch]:
        """Add penalized rewards and advantages to the batches of whole groups, before any forward pass.

        If the estimator needs the whole step (:attr:`step_wide`), ``batches`` are all batches of this rank, and the
        call is collective.
        """
        inputs = [self._inputs_known_before_forward(batch, meter) for batch in batches]
        if self.step_wide:
            return _add_advantages(batches, inputs, self._advantages_over_ranks(batches, inputs, engine))
        return _add_advantages(batches, inputs, self._advantages_on_this_rank(inputs))

    def add_correction(self, batch: Batch, *, meter: MetricAccumulator, normalizer: Tensor | None = None) -> Batch:
        """Add the rollout correction (importance weights and loss mask) to a scored batch.

        ``normalizer``: see :meth:`RolloutCorrector.correct`.
        """
        return replace(batch, correction=self.corrector.correct(batch, meter=meter, normalizer=normalizer))

    def complete_groups(self, parts: Sequence[Batch], *, beta: float, meter: MetricAccumulator) -> list[Batch]:
        """Add rewards, advantages and corrections to the batches of whole groups."""
        parts = [self.add_correction(batch, meter=meter) for batch in parts]
        inputs = [self._advantage_inputs(batch, beta=beta, meter=meter) for batch in parts]
        return _add_advantages(parts, inputs, self._advantages_on_this_rank(inputs))

    def _advantages_on_this_rank(self, inputs: Sequence[AdvantageInputs]) -> list[Advantages]:
        """Return the advantages of each micro-batch. Groups may span these micro-batches, but no others."""
        joined = inputs[0]
        if len(inputs) > 1:
            columns = {
                name: concatenate_rows([getattr(part, name) for part in inputs])
                for name in vars(inputs[0])
                if getattr(inputs[0], name) is not None
            }
            joined = replace(inputs[0], **columns)
        joint = vars(compute_advantages(self._estimator, joined, **self._estimator_options))
        sizes = [len(part.rewards) for part in inputs]
        split = zip(*(values.split(sizes) for values in joint.values()), strict=True)
        return [
            Advantages(**{name: value[:, : part.rewards.shape[1]] for name, value in zip(joint, values, strict=True)})
            for part, values in zip(inputs, split, strict=True)
        ]

    def complete_over_ranks(
        self,
        updates: Sequence[Sequence[Batch]],
        engine: TrainingEngine[nn.Module],
        *,
        beta: float,
        meter: MetricAccumulator,
    ) -> list[list[Batch]]:
        """Complete the micro-batches of each update. Groups may span micro-batches and ranks. Collective.

        All trajectories of a group are sent to its home rank. An estimator that needs the whole step in one call
        receives all trajectories on rank 0.
        """
        every = [
            self.add_correction(batch, meter=meter, normalizer=normalizer)
            for update, normalizer in zip(updates, self._correction_normalizers(updates, engine), strict=True)
            for batch in update
        ]
        inputs = [self._advantage_inputs(batch, beta=beta, meter=meter) for batch in every]
        completed = _add_advantages(every, inputs, self._advantages_over_ranks(every, inputs, engine))
        if every[0].values is not None:
            meter.add_mean("critic/explained_variance", explained_variance(completed, engine), 1.0)
        following = iter(completed)
        return [[next(following) for _ in update] for update in updates]

    def _advantages_over_ranks(
        self, batches: Sequence[Batch], inputs: Sequence[AdvantageInputs], engine: TrainingEngine[nn.Module]
    ) -> list[Advantages]:
        """Compute the advantages of each micro-batch on the home ranks of the groups. Collective.

        The advantages of batches that are not counted are 0.
        """
        inputs = [part if batch.counted else _without_rows(part) for part, batch in zip(inputs, batches, strict=True)]
        ranks = torch.cat([*(batch.home_ranks for batch in batches if batch.counted), inputs[0].groups[:0]])
        if ESTIMATORS[self._estimator].span == "step":
            ranks = torch.zeros_like(ranks)
        exchange = RowExchange([item.response_mask for item in inputs], ranks, group=engine.groups.peers)
        made = compute_advantages(
            self._estimator, exchange.send_records_to_home_ranks(inputs), communicator=engine, **self._estimator_options
        )
        parts = zip(*(exchange.return_results_to_senders(values) for values in vars(made).values()), strict=True)
        return [
            Advantages(
                **dict(zip(vars(made), part if batch.counted else [torch.zeros_like(batch.rewards)] * 3, strict=True))
            )
            for part, batch in zip(parts, batches, strict=True)
        ]

    def _correction_normalizers(
        self, updates: Sequence[Sequence[Batch]], engine: TrainingEngine[nn.Module]
    ) -> Sequence[Tensor | None]:
        """Return the normalizer [2] of each update's weights, or None without self-normalization. Collective."""
        if not self.corrector.self_normalizes:
            return [None] * len(updates)
        sums = torch.zeros(len(updates), 2, dtype=torch.float64, device=engine.device)
        for number, update in enumerate(updates):
            for batch in update:
                if batch.counted:
                    sums[number] += self.corrector.normalizer_sums(batch)
        return engine.sum_over_replicas(sums).unbind()

    def _advantage_inputs(self, batch: Batch, *, beta: float, meter: MetricAccumulator) -> AdvantageInputs:
        statistics, correction = batch.computed_statistics, batch.correction
        known = self._inputs_known_before_forward(batch, meter)
        return replace(
            known,
            rewards=self._rewards_with_kl_penalty(batch, known.rewards, beta),
            log_probs=statistics.log_probs,
            sum_pi_squared=statistics.sum_pi_squared,
            token_energy=statistics.energy,
            hidden_norm_squared=statistics.hidden_norm_squared,
            importance_weights=None if correction is None else correction.importance_weights,
            loss_mask=known.loss_mask if correction is None else correction.loss_mask,
            trajectory_energy=batch.trajectory_energy,
            values=batch.values,
            bootstrap_values=batch.bootstrap_values,
        )

    def _inputs_known_before_forward(self, batch: Batch, meter: MetricAccumulator) -> AdvantageInputs:
        """Return the estimator's inputs that are known before the forward pass."""
        return AdvantageInputs(
            rewards=self._rewards_with_length_penalty(batch, meter),
            response_mask=batch.response_mask,
            groups=batch.groups,
            loss_mask=batch.loss_mask,
            greedy_returns=batch.greedy_returns,
            samples=batch.samples,
            branches=batch.branches,
            parents=batch.parents,
            forks=batch.forks,
            path_weights=batch.path_weights,
        )

    def _rewards_with_length_penalty(self, batch: Batch, meter: MetricAccumulator) -> Tensor:
        """Add the soft penalty for overlong responses to the reward of the last model token."""
        settings = self._settings.reward
        if not settings.overlong_buffer:
            return batch.rewards
        penalties = settings.overlong_factor * overlong_penalty(
            batch.response_mask.sum(-1), max_length=self._settings.overlong_limit, buffer=settings.overlong_buffer
        )
        counted = len(penalties) * int(batch.counted)
        meter.add_mean("reward/overlong_penalty", penalties.mean(), counted)
        meter.add_mean("reward/overlong_share", (penalties < 0).double().mean(), counted)
        # The branches of a rollout share one penalty: the weighted mean of their penalties.
        return add_at_last_token(batch.rewards, batch.response_mask, penalties * batch.weights)

    def _rewards_with_kl_penalty(self, batch: Batch, rewards: Tensor, beta: float) -> Tensor:
        """Subtract the KL penalty from rewards if ``kl.placement`` is reward."""
        reference, mask, settings = batch.reference_log_probs, batch.response_mask, self._settings.kl
        if reference is None or settings.placement == "loss":
            return rewards
        estimator, full = settings.resolved_estimator, batch.computed_statistics.full_kl
        return reward_kl(rewards, batch.log_probs, reference, mask, beta=beta, estimator=estimator, full=full).rewards


def _add_advantages(
    batches: Sequence[Batch], inputs: Sequence[AdvantageInputs], estimates: Sequence[Advantages]
) -> list[Batch]:
    """Return copies of the batches with ``rewards`` from ``inputs`` and advantages from ``estimates``."""
    return [
        replace(batch, rewards=part.rewards, estimate=estimate)
        for batch, part, estimate in zip(batches, inputs, estimates, strict=True)
    ]


def _without_rows(inputs: AdvantageInputs) -> AdvantageInputs:
    return replace(inputs, **{name: value[:0] for name, value in vars(inputs).items() if value is not None})


def explained_variance(batches: Sequence[Batch], engine: TrainingEngine[nn.Module]) -> Tensor:
    """Compute 1 - Var(returns - values) / Var(returns) over the step's model tokens. Collective.

    The result is 0 if Var(returns) is 0.
    """

    def squared_deviations(values: Sequence[Tensor]) -> Tensor:
        moments = [
            Moments.from_advantages(item.double(), part.counted_mask)
            for item, part in zip(values, batches, strict=True)
            if bool(part.counted_mask.any())
        ]
        empty = Moments.empty(batches[0].computed_estimate.returns.double())
        return reduce(Moments.merge, moments, empty).all_reduce(engine).squares

    estimates = [part.computed_estimate for part in batches]
    residual = squared_deviations(
        [one.returns - part.values for one, part in zip(estimates, batches, strict=True) if part.values is not None]
    )
    total = squared_deviations([one.returns for one in estimates])
    return torch.where(total > 0, 1 - residual / torch.where(total > 0, total, 1.0), 0.0)
