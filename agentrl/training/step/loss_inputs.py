"""From evidence to targets: the rewards that are trained on, what enters the loss, and the advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages, reward_kl
from agentrl.algorithms.estimators.normalization import Moments
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.rewards import add_at_last_token, overlong_penalty
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.exchange import Exchange
from agentrl.training.engine.meter import Meter
from agentrl.training.step.correction import Corrected, Corrector
from agentrl.training.step.objective_options import estimator_options, needs
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.training.step.scored_rows import ScoredRows


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """What the loss of these rows needs beside the forward; detached."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]
    response_mask: Tensor  # [B, T] bool
    loss_mask: Tensor  # [B, T] bool
    keys: Tensor  # [B] int64, of the trajectories
    log_probs: Tensor  # [B, T] before the step's updates
    weights: Tensor | None  # [B, T] of the rollout correction
    reference_log_probs: Tensor | None  # [B, T]
    values: Tensor | None  # [B, T] the critic's, before the step's updates


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is known of one micro-batch, and the number of the update that trains it; ``counted`` if it is no dummy."""

    evidence: ScoredRows
    update: int
    counted: bool


class LossRowMaker:
    """Makes targets of a micro-batch of whole groups, or of all micro-batches of the step."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Raises SettingsError if the estimator or the correction cannot have these settings."""
        self._settings = settings
        self._estimator = settings.algorithm.estimator
        self._estimator_options = estimator_options(settings)
        self._corrector = Corrector(settings.correction)
        self.needs_exact_energy = "trajectory_energy" in needs(settings).inputs

    def energy_weights(self, evidence: ScoredRows) -> Tensor:
        """What multiplies each token's gradient in an exact energy [B, T], up to a factor common to an update."""
        return self._corrector.energy_weights(evidence)

    def make(self, evidence: ScoredRows, *, beta: float, meter: Meter, counted: bool = True) -> LossRows:
        """Of whole groups alone. ``beta`` weighs the KL penalty.

        Rows that are not ``counted`` weigh nothing in the loss and the meter.
        """
        corrected = self._corrector.correct(evidence, meter=meter, counted=counted)
        inputs = self._inputs(evidence, corrected, beta=beta, meter=meter, counted=counted)
        made = compute_advantages(self._estimator, inputs, **self._estimator_options)
        return _targets(evidence, corrected, made.advantages, made.returns, counted=counted)

    def make_over_ranks(
        self,
        parts: Sequence[Part],
        homes: Mapping[int, int],
        engine: TrainingEngine[Any],
        *,
        beta: float,
        meter: Meter,
    ) -> list[LossRows]:
        """Of every micro-batch of the step, its groups spread over micro-batches and ranks. Collective.

        A group's rows meet on the rank ``homes`` says; for an estimator that sees the whole step, all on rank 0.
        """
        normalizers = self._normalizers(parts, engine)
        corrected, inputs = [], []
        for part in parts:
            normalizer = None if normalizers is None else normalizers[part.update]
            left = self._corrector.correct(part.evidence, meter=meter, counted=part.counted, normalizer=normalizer)
            corrected.append(left)
            made = self._inputs(part.evidence, left, beta=beta, meter=meter, counted=part.counted)
            inputs.append(made if part.counted else _without_rows(made))
        groups = torch.cat([item.groups for item in inputs])
        step_wide = ESTIMATORS[self._estimator].step_wide
        places = [0 if step_wide else homes[group] for group in groups.tolist()]
        exchange = Exchange([item.response_mask for item in inputs], torch.tensor(places).to(groups))
        advantages = compute_advantages(
            self._estimator, exchange.there(inputs), step_sum=engine.total, **self._estimator_options
        )
        found = zip(exchange.back(advantages.advantages), exchange.back(advantages.returns), strict=True)
        targets = []
        for part, left, (own, returns) in zip(parts, corrected, found, strict=True):
            if not part.counted:
                own = returns = torch.zeros_like(part.evidence.rewards)
            targets.append(_targets(part.evidence, left, own, returns, counted=part.counted))
        if parts[0].evidence.values is not None:
            meter.mean("critic/explained_variance", explained_variance(targets, engine), 1.0)
        return targets

    def _normalizers(self, parts: Sequence[Part], engine: TrainingEngine[Any]) -> Tensor | None:
        """What the correction's weights of each update are normalised by [updates, 2], if they are. Collective."""
        if not self._corrector.normalizes:
            return None
        updates = 1 + max(part.update for part in parts)  # each has micro-batches on every rank
        sums = torch.zeros(updates, 2, dtype=torch.float64, device=engine.device)
        for part in parts:
            if part.counted:
                sums[part.update] += self._corrector.sums(part.evidence)
        return engine.all_reduce(sums)

    def _inputs(
        self, evidence: ScoredRows, corrected: Corrected, *, beta: float, meter: Meter, counted: bool
    ) -> AdvantageInputs:
        rewards = self._lengths(evidence, evidence.rewards, meter, counted)
        tokens = evidence.response_mask.sum() * int(counted)
        return AdvantageInputs(
            rewards=self._near_reference(evidence, rewards, beta, meter, tokens),
            response_mask=evidence.response_mask,
            groups=evidence.groups,
            log_probs=evidence.log_probs,
            sum_pi_squared=evidence.sum_pi_squared,
            token_energy=evidence.energy,
            hidden_norm_squared=evidence.hidden_norm_squared,
            importance_weights=corrected.energy_weights,
            loss_mask=corrected.loss_mask,
            trajectory_energy=evidence.trajectory_energy,
            values=evidence.values,
            bootstrap_values=_bootstrap(evidence),
            greedy_returns=evidence.greedy_returns,
        )

    def _lengths(self, evidence: ScoredRows, rewards: Tensor, meter: Meter, counted: bool) -> Tensor:
        """Rewards with the soft penalty for overlong responses on the last model token."""
        settings = self._settings.reward
        if not settings.overlong_buffer:
            return rewards
        penalties = settings.overlong_factor * overlong_penalty(
            evidence.response_mask.sum(-1), max_length=self._settings.overlong_limit, buffer=settings.overlong_buffer
        )
        rows = len(penalties) * int(counted)
        meter.mean("reward/overlong_penalty", penalties.mean(), rows)
        meter.mean("reward/overlong_share", (penalties < 0).double().mean(), rows)
        return add_at_last_token(rewards, evidence.response_mask, penalties)

    def _near_reference(
        self, evidence: ScoredRows, rewards: Tensor, beta: float, meter: Meter, tokens: Tensor
    ) -> Tensor:
        """Rewards with the KL penalty if that is its place; the mean penalty is measured wherever it is."""
        reference, mask = evidence.reference_log_probs, evidence.response_mask
        if reference is None:
            return rewards
        settings = self._settings.kl
        exact = evidence.full_kl
        penalty = kl_penalty(evidence.log_probs, reference, settings.resolved_estimator, mask=mask, full=exact)
        meter.mean("kl/mean", penalty.double().sum() / mask.sum(), tokens)
        if settings.placement == "loss":
            return rewards
        estimator = settings.resolved_estimator
        made = reward_kl(rewards, evidence.log_probs, reference, mask, beta=beta, estimator=estimator, full=exact)
        return made.rewards


def _targets(
    evidence: ScoredRows, corrected: Corrected, advantages: Tensor, returns: Tensor, *, counted: bool
) -> LossRows:
    return LossRows(
        advantages=advantages,
        returns=returns,
        response_mask=evidence.response_mask & counted,
        loss_mask=corrected.loss_mask & counted,
        keys=evidence.keys,
        log_probs=evidence.log_probs,
        weights=corrected.weights,
        reference_log_probs=evidence.reference_log_probs,
        values=evidence.values,
    )


def _without_rows(inputs: AdvantageInputs) -> AdvantageInputs:
    given = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return replace(inputs, **{name: value[:0] for name, value in given.items() if value is not None})


def explained_variance(targets: Sequence[LossRows], engine: TrainingEngine[Any]) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the step's model tokens: 1 at best, 0 for a constant. Collective.

    0 if nothing varies. The targets have values.
    """

    def spread(values: Sequence[Tensor]) -> Tensor:
        every = [
            Moments.of(item.double(), part.response_mask)
            for item, part in zip(values, targets, strict=True)
            if bool(part.response_mask.any())
        ]
        nothing = Moments.nothing(targets[0].returns.double())
        return reduce(Moments.merge, every, nothing).over_step(engine.total).squares

    missed = spread([part.returns - part.values for part in targets if part.values is not None])
    whole = spread([part.returns for part in targets])
    return torch.where(whole > 0, 1 - missed / torch.where(whole > 0, whole, 1.0), 0.0)


def _bootstrap(evidence: ScoredRows) -> Tensor | None:
    """The value after the last token where a limit ended the trajectory, else 0 [B]."""
    if evidence.final_values is None:
        return None
    return torch.where(evidence.truncated, evidence.final_values, 0.0)
