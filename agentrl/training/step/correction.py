"""Rollout correction in a step: weights and masks against the mismatch of trainer and engine, and what they did."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agentrl.algorithms import Correction, correction_sums, rollout_correction
from agentrl.training.engine.meter import Meter
from agentrl.training.settings import CorrectionSettings
from agentrl.training.step.scored_rows import ScoredRows

_OF_TRAJECTORIES = ("log_ppl_gap", "train_perplexity", "rollout_perplexity")
_LARGEST = ("max_abs_difference", "rho_max")
_COUNTS = ("tokens", "trajectories", "ess")  # ess is no mean over micro-batches: see effective_sample_size


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """What is left of the loss, and the weights of its tokens; both weights None where nothing weighs."""

    loss_mask: Tensor  # [B, T] bool
    weights: Tensor | None  # [B, T] of the loss
    energy_weights: Tensor | None  # [B, T] of the energies, beside the loss mask


class Corrector:
    """Applies the settings to the rows of a micro-batch."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self._settings = settings
        self.normalizes = settings.self_normalize

    def correct(
        self, evidence: ScoredRows, *, meter: Meter, counted: bool, normalizer: Tensor | None = None
    ) -> Corrected:
        """Rows that are not ``counted`` weigh nothing in the meter.

        ``normalizer``: the sum of :meth:`sums` over what is trained in one update, whose weights have mean 1 where the
        settings say so; each update is an optimizer step of its own. Without it these rows are an update.
        """
        if not self._settings.active:
            return Corrected(loss_mask=evidence.loss_mask, weights=None, energy_weights=None)
        correction = self._over(evidence, normalizer=normalizer)
        _measure(correction, evidence, meter, counted)
        return Corrected(
            loss_mask=correction.loss_mask,
            weights=correction.weights,
            energy_weights=correction.importance_weights,
        )

    def sums(self, evidence: ScoredRows) -> Tensor:
        """What these rows add to an update's normalizer, [2]."""
        return correction_sums(
            evidence.log_probs,
            evidence.rollout_log_probs,
            evidence.response_mask,
            loss_mask=evidence.loss_mask,
            **self._settings.model_dump(),
        )

    def energy_weights(self, evidence: ScoredRows) -> Tensor:
        """The weights of the energies [B, T] up to a factor common to all rows of an update.

        Never normalised: the mean would be that of these rows, and those of one group may lie in several micro-batches.
        """
        if not self._settings.active:
            return evidence.loss_mask.to(evidence.log_probs.dtype)
        return self._over(evidence, self_normalize=False).importance_weights

    def _over(self, evidence: ScoredRows, **changed: object) -> Correction:
        return rollout_correction(
            evidence.log_probs,
            evidence.rollout_log_probs,
            evidence.response_mask,
            loss_mask=evidence.loss_mask,
            **(self._settings.model_dump() | changed),
        )


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """``correction/ess`` from the step's means: (sum rho)^2 / (n sum rho^2), with mean rho = k3 - k1 + 1."""
    if "correction/chi2" not in metrics:
        return {}
    mean = metrics["correction/kl_k3"] - metrics["correction/kl_k1"] + 1
    return {"correction/ess": mean**2 / (metrics["correction/chi2"] + 1)}


def _measure(correction: Correction, evidence: ScoredRows, meter: Meter, counted: bool) -> None:
    tokens = evidence.response_mask.sum()
    weights = {
        **dict.fromkeys(_OF_TRAJECTORIES, evidence.response_mask.any(-1).sum()),
        "masked_fraction": evidence.loss_mask.sum(),
        "weight_mean": correction.loss_mask.sum(),
    }
    for name, value in correction.metrics.items():
        weight = weights.get(name, tokens) * int(counted)
        if name in _LARGEST:
            meter.largest(f"correction/{name}", value, weight)
        elif name == "rho_min":
            meter.smallest(f"correction/{name}", value, weight)
        elif name not in _COUNTS:
            meter.mean(f"correction/{name}", value, weight)
