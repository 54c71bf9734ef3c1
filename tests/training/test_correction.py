"""Rollout correction within a step: what it leaves to the loss, what it gives to energies, over which rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from training.rows import rows_of

from agentrl.batch import Batch
from agentrl.training.engine.collectives import MetricAccumulator
from agentrl.training.settings import CorrectionSettings
from agentrl.training.step.loss_rows import RolloutCorrector, effective_sample_size_metrics


def made(ratios: list[list[float]], *, out: list[tuple[int, int]] = ()) -> Batch:  # type: ignore[assignment]
    """Rows whose tokens the trainer finds ``ratios`` times as likely as the engine; those in ``out`` have no loss."""
    log_probs = torch.tensor(ratios, dtype=torch.float64).log() - 3
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    left = mask.clone()
    for row, place in out:
        left[row, place] = False
    return rows_of(log_probs, rollout_log_probs=torch.full_like(log_probs, -3.0), loss_mask=left)


def correct(rows: Batch, meter: MetricAccumulator | None = None, **settings: Any) -> Any:
    meter = meter or MetricAccumulator(torch.device("cpu"))
    return RolloutCorrector(CorrectionSettings(**settings)).correct(rows, meter=meter)


def test_nothing_is_weighted_unless_asked() -> None:
    assert correct(made([[1.5, 0.5]])) is None
    rows = made([[1.5, 0.5]], out=[(0, 1)])
    assert correct(rows) is None
    assert rows.correction_weights is None
    assert rows.trained_mask.tolist() == [[True, False]]


def test_truncated_weights_enter_the_loss_and_where_it_is_left_the_energies() -> None:
    result = correct(made([[1.8, 0.6, 1.2]], out=[(0, 2)]), weights="token", weight_high=1.5)
    assert result.weights.tolist() == [pytest.approx([1.5, 0.6, 1.2])]
    assert result.importance_weights.tolist() == [pytest.approx([1.5, 0.6, 0.0])]


def test_a_mask_takes_from_the_loss_mask() -> None:
    result = correct(made([[1.8, 0.6, 1.0]], out=[(0, 2)]), ratio_mask="token", ratio_low=0.5, ratio_high=1.5)
    assert result.loss_mask.tolist() == [[False, True, False]]
    assert result.importance_weights.tolist() == [[0.0, 1.0, 0.0]]


def test_weights_are_normalised_by_the_sums_of_an_update() -> None:
    corrector = RolloutCorrector(CorrectionSettings(weights="token", weight_high=10.0, self_normalize=True))
    parts = [made([[1.0, 3.0]]), made([[1.0, 1.0]], out=[(0, 0)])]
    total = torch.stack([corrector.normalizer_sums(part) for part in parts]).sum(0)
    meter = MetricAccumulator(torch.device("cpu"))
    found = [corrector.correct(part, meter=meter, normalizer=total).weights for part in parts]
    mean = 5 / 3  # of the weights left to the loss: 1, 3 and 1
    assert torch.cat(found).flatten().tolist() == pytest.approx([1 / mean, 3 / mean, 1 / mean, 1 / mean])


def test_exact_energies_do_not_depend_on_what_shares_a_micro_batch() -> None:
    """Their weights come micro-batch by micro-batch, and one group's rows may lie in several."""
    rows = [[1.0, 3.0], [0.5, 0.5]]
    corrector = RolloutCorrector(CorrectionSettings(weights="token", weight_high=10.0, self_normalize=True))
    together = corrector.energy_weights(made(rows))
    apart = torch.cat([corrector.energy_weights(made([row])) for row in rows])
    assert (together / together[0, 0]).tolist() == [pytest.approx([1.0, 3.0]), pytest.approx([0.5, 0.5])]
    assert (apart / apart[0, 0]).tolist() == (together / together[0, 0]).tolist()


def test_effective_sample_size_from_the_means() -> None:
    rho = [1.8, 0.6, 1.2]
    metrics = {
        "correction/chi2": sum(value**2 for value in rho) / 3 - 1,
        "correction/kl_k1": -sum(map(math.log, rho)) / 3,
        "correction/kl_k3": sum(value - math.log(value) - 1 for value in rho) / 3,
    }
    exact = sum(rho) ** 2 / (3 * sum(value**2 for value in rho))
    assert effective_sample_size_metrics(metrics) == {"correction/ess": pytest.approx(exact)}
    assert effective_sample_size_metrics({}) == {}
