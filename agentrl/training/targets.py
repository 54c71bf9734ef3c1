"""From evidence to targets: the rewards that are trained on, what enters the loss, and the advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, compute_advantages, reward_kl
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.rewards import add_at_last_token, overlong_penalty
from agentrl.training.correction import Corrector
from agentrl.training.evidence import Evidence, Rows
from agentrl.training.meter import Meter
from agentrl.training.objective_settings import ObjectiveSettings
from agentrl.training.options import estimator_options, needs


@dataclass(frozen=True, kw_only=True)
class Targets(Rows):
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

    @classmethod
    def weightless(cls, evidence: Evidence) -> Targets:
        """Nothing is in the loss, nothing is learned from."""
        nothing, zeros = torch.zeros_like(evidence.loss_mask), torch.zeros_like(evidence.rewards)
        return cls(
            advantages=zeros,
            returns=zeros,
            response_mask=nothing,
            loss_mask=nothing,
            keys=evidence.keys,
            log_probs=evidence.log_probs,
            weights=None,
            reference_log_probs=evidence.reference_log_probs,
            values=evidence.values,
        )


class TargetMaker:
    """Makes targets of whole groups; of the whole step where the plan says that something needs it."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        """Raises SettingsError if the estimator or the correction cannot have these settings."""
        self._settings = settings
        self._estimator = settings.algorithm.estimator
        self._estimator_options = estimator_options(settings)
        self._corrector = Corrector(settings.correction)
        self.needs_exact_energy = "trajectory_energy" in needs(settings).inputs

    def energy_weights(self, evidence: Evidence) -> Tensor:
        """What multiplies each token's gradient in an exact energy [B, T], up to a factor common to an update."""
        return self._corrector.energy_weights(evidence)

    def make(self, evidence: Evidence, *, beta: float, meter: Meter, counted: bool = True) -> Targets:
        """``beta`` weighs the KL penalty. Rows that are not ``counted`` weigh nothing in the loss and the meter."""
        mask = evidence.response_mask
        tokens = mask.sum() * int(counted)
        corrected = self._corrector.correct(evidence, meter=meter, counted=counted)
        rewards = self._lengths(evidence, evidence.rewards, meter, counted)
        rewards = self._near_reference(evidence, rewards, beta, meter, tokens)
        result = compute_advantages(
            self._estimator,
            AdvantageInputs(
                rewards=rewards,
                response_mask=mask,
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
            ),
            **self._estimator_options,
        )
        if evidence.values is not None:
            meter.mean("critic/explained_variance", explained_variance(evidence.values, result.returns, mask), tokens)
        return Targets(
            advantages=result.advantages,
            returns=result.returns,
            response_mask=mask & counted,
            loss_mask=corrected.loss_mask & counted,
            keys=evidence.keys,
            log_probs=evidence.log_probs,
            weights=corrected.weights,
            reference_log_probs=evidence.reference_log_probs,
            values=evidence.values,
        )

    def _lengths(self, evidence: Evidence, rewards: Tensor, meter: Meter, counted: bool) -> Tensor:
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

    def _near_reference(self, evidence: Evidence, rewards: Tensor, beta: float, meter: Meter, tokens: Tensor) -> Tensor:
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


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over model tokens: 1 at best, 0 for a constant; 0 if nothing varies."""
    aims = returns[mask].double()
    spread = aims.var(correction=0) if aims.numel() else aims.sum()
    missed = (aims - values[mask].double()).var(correction=0) if aims.numel() else aims.sum()
    return torch.where(spread > 0, 1 - missed / torch.where(spread > 0, spread, 1.0), 0.0)


def _bootstrap(evidence: Evidence) -> Tensor | None:
    """The value after the last token where a limit ended the trajectory, else 0 [B]."""
    if evidence.final_values is None:
        return None
    return torch.where(evidence.truncated, evidence.final_values, 0.0)
