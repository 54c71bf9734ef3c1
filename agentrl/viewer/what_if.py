"""Compute advantages from stored token statistics, with the run's estimator or another estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages, estimator_needs
from agentrl.errors import SettingsError
from agentrl.telemetry.tokens import RowKey, StoredStep, StoredTrajectory, TokenColumns, TokenMetadata, TrajectoryTokens


def recompute_advantages(
    step: StoredStep,
    trajectories: Sequence[StoredTrajectory],
    *,
    estimator: str | None = None,
    options: dict[str, object] | None = None,
) -> dict[RowKey, dict[str, np.ndarray]]:
    """Compute ``advantages``, ``returns`` and ``baselines`` [K] of ``trajectories``, which must be complete groups.

    By default, the estimator and the options of the run are used. For another estimator, ``options`` must be complete.
    If the estimator spans the step, ``step`` must contain all trajectories. Raises SettingsError if the step lacks an
    input of the estimator, and the errors of ``compute_advantages``.
    """
    facts = require_token_metadata(step)
    name = estimator or facts.estimator
    chosen_options = facts.estimator_options if estimator is None and options is None else options or {}
    wide = estimator_needs(name, **chosen_options).step_wide
    chosen = [item for item in (step.trajectories if wide else trajectories) if item.tokens is not None]
    order = {key: index for index, key in enumerate(step.rows)}
    # Use the order of training, because estimators sum over rows and the result should be bitwise equal.
    chosen.sort(key=lambda item: order[item.key])
    made = compute_advantages(name, build_stored_advantage_inputs(chosen), communicator=None, **chosen_options)
    return {
        item.key: {name: values[row].numpy()[item.model_token_positions] for name, values in vars(made).items()}
        for row, item in enumerate(chosen)
    }


def require_token_metadata(step: StoredStep) -> TokenMetadata:
    """Return the metadata of a step's token statistics. Raises SettingsError if they are not stored."""
    if step.facts is None:
        reasons = "; ".join(step.warnings) or "telemetry.tokens_every skips it, or it trained on no trajectory"
        raise SettingsError(f"step {step.step} has no token statistics: {reasons}")
    return step.facts


def build_stored_advantage_inputs(trajectories: Sequence[StoredTrajectory]) -> AdvantageInputs:
    """Build estimator inputs [B, T] from the trajectories that have token statistics, in the layout of training."""
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
        groups=_integers(rows, "group"),
        log_probs=tokens("log_probs"),
        token_energy=tokens("energy"),
        hidden_norm_squared=tokens("hidden_norm_squared"),
        importance_weights=None if weights is None else torch.where(loss_mask, weights, 0.0),
        loss_mask=loss_mask,
        trajectory_energy=_floats(rows, "trajectory_energy"),
        values=tokens("values"),
        bootstrap_values=_floats(rows, "bootstrap_value"),
        greedy_returns=_floats(rows, "greedy_return"),
        samples=_integers(rows, "sample"),
        branches=_integers(rows, "branch"),
        parents=_integers(rows, "parent"),
        forks=_integers(rows, "fork"),
        path_weights=_floats(rows, "path_weight"),
    )


def _integers(rows: Sequence[TrajectoryTokens], name: str) -> Tensor:
    return torch.tensor([getattr(row, name) for row in rows], dtype=torch.int64)


def _floats(rows: Sequence[TrajectoryTokens], name: str) -> Tensor | None:
    numbers = [getattr(row, name) for row in rows]
    return None if any(value is None for value in numbers) else torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A group under another estimator: ``advantages``, ``returns`` and ``baselines`` [K] of its trajectories.

    ``power`` is the gradient power of these trajectories with the new advantages, and ``power_before`` with the
    advantages of training.
    """

    estimator: str
    options: dict[str, object]
    columns: dict[RowKey, TokenColumns]
    power: float
    power_before: float


def compute_what_if(
    step: StoredStep,
    trajectory: StoredTrajectory,
    *,
    estimator: str,
    options: Mapping[str, object] | None = None,
    size: int | None = None,
) -> WhatIf:
    """Recompute ``trajectory``'s group with ``estimator``. Omitted ``options`` default to the run's options.

    ``size`` reduces the group to the rollout of ``trajectory`` and the first other rollouts. Raises SettingsError if
    the step lacks a required value, and the errors of ``compute_advantages``.
    """
    resolved = merge_options_with_defaults(step, estimator, options or {})
    kept = _limit_group_size(step.trained_group(trajectory), trajectory, size)
    left_out = {item.key for item in step.trained_group(trajectory)} - {item.key for item in kept}
    smaller = replace(step, trajectories=tuple(item for item in step.trajectories if item.key not in left_out))
    made = recompute_advantages(smaller, kept, estimator=estimator, options=resolved)
    columns = {item.key: made[item.key] for item in kept}
    rows = {item.key: item.tokens for item in kept if item.tokens is not None}
    changed = [replace(row, advantages=columns[key]["advantages"]) for key, row in rows.items()]
    return WhatIf(
        estimator=estimator,
        options=resolved,
        columns=columns,
        power=float(sum(row.gradient_power.sum() for row in changed)),
        power_before=float(sum(row.gradient_power.sum() for row in rows.values())),
    )


def merge_options_with_defaults(step: StoredStep, estimator: str, options: Mapping[str, object]) -> dict[str, object]:
    """Merge ``options`` with the run's options that ``estimator`` accepts, and with the defaults."""
    names = ESTIMATORS.option_names(estimator)
    from_run = {name: value for name, value in require_token_metadata(step).estimator_options.items() if name in names}
    defaults = {form.name: form.default for form in list_option_forms(estimator) if form.default is not None}
    return {**defaults, **from_run, **options}


def _limit_group_size(
    trained_group: list[StoredTrajectory], trajectory: StoredTrajectory, size: int | None
) -> list[StoredTrajectory]:
    """Return the trajectories of ``size`` rollouts (default: all): ``trajectory``'s rollout, then the first others."""
    samples = [*dict.fromkeys([trajectory.key.sample, *(item.key.sample for item in trained_group)])]
    if trajectory.tokens is None:
        raise SettingsError(
            f"the step did not train on trajectory {trajectory.number}: choose another trajectory of its group"
        )
    if size is None:
        return trained_group
    if not 1 <= size <= len(samples):
        raise SettingsError(
            f"N must be 1 to {len(samples)}, the number of this group's rollouts that were trained on; got {size}"
        )
    return [item for item in trained_group if item.key.sample in samples[:size]]


@dataclass(frozen=True, kw_only=True)
class OptionForm:
    """Form field of an option. Without ``choices``, its value has the default's type."""

    name: str
    default: object
    choices: list[object]


def list_estimator_forms() -> dict[str, list[OptionForm]]:
    """Return the options of every estimator, including estimators of loaded plug-ins."""
    return {name: list_option_forms(name) for name in ESTIMATORS.names()}


def list_option_forms(estimator: str) -> list[OptionForm]:
    """Return the options of an estimator. ``default`` is None for a required option."""
    return [
        OptionForm(
            name=item.name,
            default=None if item.default is MISSING else item.default,
            choices=_option_choices(item.default, item.metadata.get("limits", ())),
        )
        for item in fields(ESTIMATORS[estimator].options)
    ]


def _option_choices(default: object, limits: tuple[object, ...]) -> list[object]:
    if isinstance(default, bool):
        return [False, True]
    return list(limits[0]) if len(limits) == 1 and isinstance(limits[0], tuple) else []
