"""Advantages of a stored group under another estimator, and the estimators to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace

from agentrl.algorithms import ESTIMATORS
from agentrl.errors import SettingsError
from agentrl.inspection.recompute import facts_of, recomputed
from agentrl.telemetry.tokens.stored_step import StoredStep, StoredTrajectory, TokenColumns
from agentrl.telemetry.tokens.trajectory_tokens import RowKey


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Result of another estimator: ``advantages``, ``returns`` and ``baselines`` [K] of the group's trajectories.

    ``power`` is the gradient power of these trajectories with the new advantages, ``power_before`` with the advantages
    of training.
    """

    estimator: str
    options: dict[str, object]
    columns: dict[RowKey, TokenColumns]
    power: float
    power_before: float


def what_if(
    step: StoredStep,
    trajectory: StoredTrajectory,
    *,
    estimator: str,
    options: Mapping[str, object] | None = None,
    size: int | None = None,
) -> WhatIf:
    """Compute the group of ``trajectory`` under ``estimator``. Omitted ``options`` default to those of the run.

    ``size`` reduces the group to the rollout of ``trajectory`` and the first other rollouts. Raises SettingsError if
    the step lacks a required value, and the errors of ``compute_advantages``.
    """
    resolved = all_options(step, estimator, options or {})
    kept = _first_rollouts(step.siblings(trajectory), trajectory, size)
    left_out = {item.key for item in step.siblings(trajectory)} - {item.key for item in kept}
    smaller = replace(step, trajectories=tuple(item for item in step.trajectories if item.key not in left_out))
    made = recomputed(smaller, kept, estimator=estimator, options=resolved)
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


def all_options(step: StoredStep, estimator: str, options: Mapping[str, object]) -> dict[str, object]:
    """Merge ``options`` with the run's options that the estimator accepts, and with its defaults."""
    names = ESTIMATORS.option_names(estimator)
    from_run = {name: value for name, value in facts_of(step).estimator_options.items() if name in names}
    defaults = {form.name: form.default for form in option_forms(estimator) if form.default is not None}
    return {**defaults, **from_run, **options}


def _first_rollouts(
    siblings: list[StoredTrajectory], trajectory: StoredTrajectory, size: int | None
) -> list[StoredTrajectory]:
    """Trajectories of the first ``size`` rollouts, including ``trajectory``'s, in the order of training."""
    samples = [*dict.fromkeys([trajectory.key.sample, *(item.key.sample for item in siblings)])]
    if trajectory.tokens is None:
        raise SettingsError(
            f"the step did not train on trajectory {trajectory.number}: choose another trajectory of its group"
        )
    if size is None:
        return siblings
    if not 1 <= size <= len(samples):
        raise SettingsError(f"the step trained on {len(samples)} rollouts of this group; valid N: 1 to {len(samples)}")
    return [item for item in siblings if item.key.sample in samples[:size]]


@dataclass(frozen=True, kw_only=True)
class OptionForm:
    """Form field of an option: one of ``choices`` if there are any, otherwise a value of the default's type."""

    name: str
    default: object
    choices: list[object]


def estimator_forms() -> dict[str, list[OptionForm]]:
    """Return every estimator with its options, including estimators of loaded plug-ins."""
    return {name: option_forms(name) for name in ESTIMATORS.names()}


def option_forms(estimator: str) -> list[OptionForm]:
    """Return the options of an estimator; ``default`` is None for a required option."""
    return [
        OptionForm(
            name=item.name,
            default=None if item.default is MISSING else item.default,
            choices=_choices(item.default, item.metadata.get("limits", ())),
        )
        for item in fields(ESTIMATORS[estimator].options)
    ]


def _choices(default: object, limits: tuple[object, ...]) -> list[object]:
    if isinstance(default, bool):
        return [False, True]
    return list(limits[0]) if len(limits) == 1 and isinstance(limits[0], tuple) else []
