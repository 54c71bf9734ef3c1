"""Rollout correction in a step: weights and masks for the mismatch of trainer and engine, and their metrics."""

from __future__ import annotations

from torch import Tensor

from agentrl.algorithms import Correction, correction_sums, rollout_correction
from agentrl.training.engine.meter import Meter
from agentrl.training.settings import CorrectionSettings
from agentrl.training.step.rows import LossRows

_OF_TRAJECTORIES = ("log_ppl_gap", "train_perplexity", "rollout_perplexity")
_LARGEST = ("max_abs_difference", "rho_max")
_COUNTS = ("tokens", "trajectories", "ess")  # ess is no mean over micro-batches: see effective_sample_size


class Corrector:
    """Applies the settings to the rows of a micro-batch."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self._active = settings.active
        self._options = settings.model_dump()
        self.normalizes = settings.self_normalize

    def correct(self, rows: LossRows, *, meter: Meter, normalizer: Tensor | None = None) -> Correction | None:
        """Weights and loss mask of the rows; None where no correction is set.

        ``normalizer``: the sum of :meth:`sums` over the rows of one update; without it these rows are a whole update.
        """
        if not self._active:
            return None
        correction = self._over(rows, normalizer=normalizer)
        _measure(correction, rows, meter)
        return correction

    def sums(self, rows: LossRows) -> Tensor:
        """The contribution of these rows to an update's normalizer, [2]."""
        batch = rows.batch
        return correction_sums(
            rows.log_probs, batch.rollout_log_probs, batch.response_mask, loss_mask=batch.loss_mask, **self._options
        )

    def energy_weights(self, rows: LossRows) -> Tensor:
        """The weights of the energies [B, T], never normalised: a group may be spread over micro-batches."""
        if not self._active:
            return rows.batch.loss_mask.to(rows.log_probs.dtype)
        return self._over(rows, self_normalize=False).importance_weights

    def _over(self, rows: LossRows, **changed: object) -> Correction:
        batch = rows.batch
        return rollout_correction(
            rows.log_probs,
            batch.rollout_log_probs,
            batch.response_mask,
            loss_mask=batch.loss_mask,
            **(self._options | changed),
        )


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """``correction/ess`` from the step's means: (sum rho)^2 / (n sum rho^2), with mean rho = k3 - k1 + 1."""
    if "correction/chi2" not in metrics:
        return {}
    mean = metrics["correction/kl_k3"] - metrics["correction/kl_k1"] + 1
    return {"correction/ess": mean**2 / (metrics["correction/chi2"] + 1)}


def _measure(correction: Correction, rows: LossRows, meter: Meter) -> None:
    mask = rows.batch.response_mask
    tokens = mask.sum()
    weights = {
        **dict.fromkeys(_OF_TRAJECTORIES, mask.any(-1).sum()),
        "masked_fraction": rows.batch.loss_mask.sum(),
        "weight_mean": correction.loss_mask.sum(),
    }
    for name, value in correction.metrics.items():
        weight = weights.get(name, tokens) * int(rows.batch.counted)
        if name in _LARGEST:
            meter.largest(f"correction/{name}", value, weight)
        elif name == "rho_min":
            meter.smallest(f"correction/{name}", value, weight)
        elif name not in _COUNTS:
            meter.mean(f"correction/{name}", value, weight)
