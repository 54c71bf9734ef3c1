"""Rollout correction in a step: weights and masks against the mismatch of trainer and engine, and what they did."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from agentrl.algorithms import Correction, rollout_correction
from agentrl.training.evidence import Evidence
from agentrl.training.meter import Meter
from agentrl.training.settings import CorrectionSettings

_OF_TRAJECTORIES = ("log_ppl_gap", "train_perplexity", "rollout_perplexity")
_LARGEST = ("max_abs_difference", "rho_max")
_COUNTS = ("tokens", "trajectories", "ess")  # ess is no mean over micro-batches: see effective_sample_size


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """What is left of the loss, and the weights of its tokens; both weights None where nothing weighs."""

    loss_mask: Tensor  # [B, T] bool
    weights: Tensor | None  # [B, T] of the loss
    energy_weights: Tensor | None  # [B, T] of the energies: zero where a model token is out of the loss


class Corrector:
    """Applies the settings to evidence: of the whole step where they are step-wide, else of any rows."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self._settings = settings

    def correct(self, evidence: Evidence, *, meter: Meter, counted: bool) -> Corrected:
        """Rows that are not ``counted`` weigh nothing in the meter."""
        given = evidence.loss_mask
        if not self._settings.active:
            rejected = bool((evidence.response_mask & ~given).any())
            return Corrected(
                loss_mask=given, weights=None, energy_weights=given.to(evidence.rewards.dtype) if rejected else None
            )
        correction = self._apply(evidence)
        _measure(correction, evidence, meter, counted)
        return Corrected(
            loss_mask=correction.loss_mask,
            weights=correction.weights,
            energy_weights=correction.importance_weights,
        )

    def energy_weights(self, evidence: Evidence) -> Tensor:
        """The weights of the energies [B, T] up to a factor common to all rows of an update.

        Never normalised: the mean would be that of these rows, and those of one group may lie in several micro-batches.
        """
        if not self._settings.active:
            return evidence.loss_mask.to(evidence.log_probs.dtype)
        return self._over(evidence, self_normalize=False).importance_weights

    def _apply(self, evidence: Evidence) -> Correction:
        whole = self._over(evidence)
        if not self._settings.self_normalize:
            return whole
        # Each update is an optimizer step of its own: its weights have mean 1.
        weights = whole.weights.clone()
        for update in evidence.updates.unique():
            rows = evidence.updates == update
            weights[rows] = self._over(evidence.take(rows)).weights
        return replace(whole, weights=weights)

    def _over(self, evidence: Evidence, **changed: object) -> Correction:
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


def _measure(correction: Correction, evidence: Evidence, meter: Meter, counted: bool) -> None:
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
