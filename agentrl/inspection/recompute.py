"""Advantages from stored token statistics, by the estimator of the run or by another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, Advantages, compute_advantages, estimator_needs
from agentrl.errors import SettingsError
from agentrl.telemetry.tokens.stored_step import StoredStep, StoredTrajectory
from agentrl.telemetry.tokens.token_file import TokenFacts
from agentrl.telemetry.tokens.trajectory_tokens import RowKey, TrajectoryTokens


def recomputed(
    step: StoredStep,
    trajectories: Sequence[StoredTrajectory],
    *,
    estimator: str | None = None,
    options: dict[str, object] | None = None,
) -> dict[RowKey, dict[str, np.ndarray]]:
    """Compute ``advantages``, ``returns`` and ``baselines`` [K] of ``trajectories``, which must be complete groups.

    By default the estimator and the options of the run apply. For another estimator, ``options`` must be complete. If
    the estimator spans the step, ``step`` must contain all its trajectories. Raises SettingsError if the step lacks an
    input of the estimator, and the errors of ``compute_advantages``.
    """
    facts = facts_of(step)
    name = estimator or facts.estimator
    chosen_options = facts.estimator_options if estimator is None and options is None else options or {}
    wide = estimator_needs(name, **chosen_options).step_wide
    chosen = [item for item in (step.trajectories if wide else trajectories) if item.tokens is not None]
    order = {key: index for index, key in enumerate(step.rows)}
    # In the order of training: estimators sum over rows, and the result should be bitwise the same.
    chosen.sort(key=lambda item: order[item.key])
    made = compute_advantages(name, stored_inputs(chosen), calls=None, **chosen_options)
    return {item.key: _of_row(made, row, item) for row, item in enumerate(chosen)}


def facts_of(step: StoredStep) -> TokenFacts:
    """Return how the step computed its advantages. Raises SettingsError if its token statistics are not stored."""
    if step.facts is None:
        reasons = "; ".join(step.problems) or "telemetry.tokens_every skips it, or no trajectory of it was trained on"
        raise SettingsError(f"step {step.step} has no token statistics: {reasons}")
    return step.facts


def stored_inputs(trajectories: Sequence[StoredTrajectory]) -> AdvantageInputs:
    """Build the estimator's inputs for trajectories with token statistics, in the layout of training: [B, T]."""
    rows = [item.tokens for item in trajectories if item.tokens is not None]
    masks = [item.model_mask for item in trajectories if item.tokens is not None]
    mask = torch.zeros(len(rows), max(len(row_mask) for row_mask in masks), dtype=torch.bool)
    for row, row_mask in enumerate(masks):
        mask[row, : len(row_mask)] = torch.from_numpy(row_mask)

    def tokens(name: str) -> Tensor | None:
        values = [getattr(row, name) for row in rows]
        if any(item is None for item in values):
            return None
        flat = torch.from_numpy(np.concatenate(values))
        return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter_(mask, flat)

    loss_mask, weights = tokens("loss_mask"), tokens("weights")
    assert loss_mask is not None
    rewards = tokens("rewards")
    assert rewards is not None
    return AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        groups=_whole(rows, "group"),
        log_probs=tokens("log_probs"),
        token_energy=tokens("energy"),
        hidden_norm_squared=tokens("hidden_norm_squared"),
        importance_weights=None if weights is None else torch.where(loss_mask, weights, 0.0),
        loss_mask=loss_mask,
        trajectory_energy=_numbers(rows, "trajectory_energy"),
        values=tokens("values"),
        bootstrap_values=_numbers(rows, "bootstrap_value"),
        greedy_returns=_numbers(rows, "greedy_return"),
        samples=_whole(rows, "sample"),
        branches=_whole(rows, "branch"),
        parents=_whole(rows, "parent"),
        forks=_whole(rows, "fork"),
    )


def _of_row(made: Advantages, row: int, item: StoredTrajectory) -> dict[str, np.ndarray]:
    return {name: values[row].numpy()[item.positions] for name, values in vars(made).items()}


def _whole(rows: Sequence[TrajectoryTokens], name: str) -> Tensor:
    return torch.tensor([getattr(row, name) for row in rows], dtype=torch.int64)


def _numbers(rows: Sequence[TrajectoryTokens], name: str) -> Tensor | None:
    numbers = [getattr(row, name) for row in rows]
    return None if any(value is None for value in numbers) else torch.tensor(numbers, dtype=torch.float64)
