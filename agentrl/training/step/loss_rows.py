"""From scored rows to loss rows: rewards with penalties, the rollout correction, and the advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce

import torch
from torch import Tensor, nn

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, Advantages, Correction, compute_advantages, reward_kl
from agentrl.algorithms.estimators.normalization import Moments
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.rewards import add_at_last_token, overlong_penalty
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.exchange import Exchange
from agentrl.training.engine.meter import Meter
from agentrl.training.step.correction import Corrector
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_options, needs
from agentrl.training.step.rows import LossRows, ScoredRows


class LossRowMaker:
    """Makes loss rows of a micro-batch of whole groups or of the whole step. ``beta`` weighs the KL penalty."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Raises SettingsError if the estimator or the correction does not accept these settings."""
        self._settings = settings
        self._estimator = settings.algorithm.estimator
        self._estimator_options = estimator_options(settings)
        self.corrector = Corrector(settings.correction)
        self.needs_exact_energy = "trajectory_energy" in needs(settings).inputs

    def make(self, scored: ScoredRows, *, beta: float, meter: Meter) -> LossRows:
        """The loss rows of whole groups."""
        correction = self.corrector.correct(scored, meter=meter)
        inputs = self._inputs(scored, correction, beta=beta, meter=meter)
        made = compute_advantages(self._estimator, inputs, **self._estimator_options)
        return LossRows(scored=scored, correction=correction, rewards=inputs.rewards, **vars(made))

    def make_over_ranks(
        self,
        updates: Sequence[Sequence[ScoredRows]],
        homes: Mapping[int, int],
        engine: TrainingEngine[nn.Module],
        *,
        beta: float,
        meter: Meter,
    ) -> list[list[LossRows]]:
        """The loss rows of every micro-batch of each update; groups may span micro-batches and ranks. Collective.

        ``homes`` names the rank that receives all rows of a group; an estimator that needs the whole step in one
        call receives everything on rank 0.
        """
        every = [scored for update in updates for scored in update]
        corrections = [
            self.corrector.correct(scored, meter=meter, normalizer=normalizer)
            for update, normalizer in zip(updates, self._normalizers(updates, engine), strict=True)
            for scored in update
        ]
        inputs = [
            self._inputs(scored, correction, beta=beta, meter=meter)
            for scored, correction in zip(every, corrections, strict=True)
        ]
        counted = [own if scored.counted else _without_rows(own) for own, scored in zip(inputs, every, strict=True)]
        nothing = [torch.zeros_like(scored.batch.rewards) for scored in every]
        made = [
            LossRows(
                scored=scored,
                correction=correction,
                rewards=own.rewards,
                **(vars(estimate) if scored.counted else dict.fromkeys(vars(estimate), none)),
            )
            for scored, correction, own, estimate, none in zip(
                every, corrections, inputs, self._advantages(counted, homes, engine), nothing, strict=True
            )
        ]
        if every[0].values is not None:
            meter.mean("critic/explained_variance", explained_variance(made, engine), 1.0)
        following = iter(made)
        return [[next(following) for _ in update] for update in updates]

    def _advantages(
        self, inputs: Sequence[AdvantageInputs], homes: Mapping[int, int], engine: TrainingEngine[nn.Module]
    ) -> list[Advantages]:
        """The advantages of each micro-batch, computed on the ranks where the groups are whole. Collective."""
        groups = torch.cat([item.groups for item in inputs])
        on_rank_0 = ESTIMATORS[self._estimator].span == "step"
        places = [0 if on_rank_0 else homes[group] for group in groups.tolist()]
        masks = [item.response_mask for item in inputs]
        exchange = Exchange(masks, torch.tensor(places).to(groups), group=engine.groups.peers)
        made = compute_advantages(self._estimator, exchange.there(inputs), calls=engine, **self._estimator_options)
        parts = zip(*(exchange.back(values) for values in vars(made).values()), strict=True)
        return [Advantages(**dict(zip(vars(made), part, strict=True))) for part in parts]

    def _normalizers(
        self, updates: Sequence[Sequence[ScoredRows]], engine: TrainingEngine[nn.Module]
    ) -> Sequence[Tensor | None]:
        """The normalizer of the correction's weights for each update [2], None without one. Collective."""
        if not self.corrector.normalizes:
            return [None] * len(updates)
        sums = torch.zeros(len(updates), 2, dtype=torch.float64, device=engine.device)
        for number, update in enumerate(updates):
            for scored in update:
                if scored.counted:
                    sums[number] += self.corrector.sums(scored)
        return engine.all_reduce(sums).unbind()

    def _inputs(
        self, scored: ScoredRows, correction: Correction | None, *, beta: float, meter: Meter
    ) -> AdvantageInputs:
        batch, statistics, after = scored.batch, scored.statistics, scored.final_values
        rewards = self._with_length_penalty(scored, meter)
        return AdvantageInputs(
            rewards=self._with_kl_penalty(scored, rewards, beta, meter),
            response_mask=batch.response_mask,
            groups=batch.groups,
            log_probs=statistics.log_probs,
            sum_pi_squared=statistics.sum_pi_squared,
            token_energy=statistics.energy,
            hidden_norm_squared=statistics.hidden_norm_squared,
            importance_weights=None if correction is None else correction.importance_weights,
            loss_mask=batch.loss_mask if correction is None else correction.loss_mask,
            trajectory_energy=scored.trajectory_energy,
            values=scored.values,
            bootstrap_values=None if after is None else torch.where(batch.truncated, after, 0.0),
            greedy_returns=scored.greedy_returns,
            samples=batch.samples,
            branches=batch.branches,
            parents=batch.parents,
            forks=batch.forks,
        )

    def _with_length_penalty(self, scored: ScoredRows, meter: Meter) -> Tensor:
        """Rewards with the soft penalty for overlong responses on the last model token."""
        settings, batch = self._settings.reward, scored.batch
        if not settings.overlong_buffer:
            return batch.rewards
        penalties = settings.overlong_factor * overlong_penalty(
            batch.response_mask.sum(-1), max_length=self._settings.overlong_limit, buffer=settings.overlong_buffer
        )
        rows = len(penalties) * int(scored.counted)
        meter.mean("reward/overlong_penalty", penalties.mean(), rows)
        meter.mean("reward/overlong_share", (penalties < 0).double().mean(), rows)
        # The branches of a rollout share one penalty: the mean of theirs.
        return add_at_last_token(batch.rewards, batch.response_mask, penalties * batch.weights)

    def _with_kl_penalty(self, scored: ScoredRows, rewards: Tensor, beta: float, meter: Meter) -> Tensor:
        """Rewards with the KL penalty if ``kl.placement`` is reward; its mean is measured in any case."""
        reference, mask, exact = scored.reference_log_probs, scored.batch.response_mask, scored.statistics.full_kl
        if reference is None:
            return rewards
        estimator = self._settings.kl.resolved_estimator
        penalty = kl_penalty(scored.log_probs, reference, estimator, mask=mask, full=exact)
        tokens = mask.sum()
        meter.mean("kl/mean", penalty.double().sum() / tokens, tokens * int(scored.counted))
        if self._settings.kl.placement == "loss":
            return rewards
        return reward_kl(rewards, scored.log_probs, reference, mask, beta=beta, estimator=estimator, full=exact).rewards


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
        nothing = Moments.nothing(rows[0].returns.double())
        return reduce(Moments.merge, every, nothing).over_step(engine).squares

    missed = spread([part.returns - part.scored.values for part in rows if part.scored.values is not None])
    whole = spread([part.returns for part in rows])
    return torch.where(whole > 0, 1 - missed / torch.where(whole > 0, whole, 1.0), 0.0)
