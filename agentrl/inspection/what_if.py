"""A stored group under another estimator, and the estimators that there are to choose from."""

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
    """``columns`` of each rollout of the group that is taken along: ``advantages``, ``returns``, ``baselines`` [K].

    ``power`` is the group's gradient power, the sum over these trajectories, with these advantages; ``power_before``
    the same with the advantages that training used.
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
    """The group of ``trajectory`` under ``estimator``; the run's own options hold where ``options`` says nothing.

    ``size``: take the rollout of ``trajectory`` and the first others of the group, so many in all. Raises
    SettingsError for what the step does not store, and the errors of ``compute_advantages``.
    """
    given = all_options(step, estimator, options or {})
    kept = _first_rollouts(step.siblings(trajectory), trajectory, size)
    left_out = {item.key for item in step.siblings(trajectory)} - {item.key for item in kept}
    smaller = replace(step, trajectories=tuple(item for item in step.trajectories if item.key not in left_out))
    made = recomputed(smaller, kept, estimator=estimator, options=given)
    columns = {item.key: made[item.key] for item in kept}
    rows = {item.key: item.tokens for item in kept if item.tokens is not None}
    changed = [replace(row, advantages=columns[key]["advantages"]) for key, row in rows.items()]
    return WhatIf(
        estimator=estimator,
        options=given,
        columns=columns,
        power=float(sum(row.gradient_power.sum() for row in changed)),
        power_before=float(sum(row.gradient_power.sum() for row in rows.values())),
    )


def all_options(step: StoredStep, estimator: str, options: Mapping[str, object]) -> dict[str, object]:
    """``options``, then those of the run that the estimator takes, then its defaults."""
    names = ESTIMATORS.option_names(estimator)
    own = {name: value for name, value in facts_of(step).estimator_options.items() if name in names}
    defaults = {form.name: form.default for form in option_forms(estimator) if form.default is not None}
    return {**defaults, **own, **options}


def _first_rollouts(
    siblings: list[StoredTrajectory], trajectory: StoredTrajectory, size: int | None
) -> list[StoredTrajectory]:
    """All branches of the rollouts that are kept, in the order of training."""
    samples = [*dict.fromkeys([trajectory.key.sample, *(item.key.sample for item in siblings)])]
    if trajectory.tokens is None:
        raise SettingsError(f"the step did not train on trajectory {trajectory.number}: choose another of its group")
    if size is None:
        return siblings
    if not 1 <= size <= len(samples):
        raise SettingsError(f"the step trained on {len(samples)} rollouts of this group: N is 1 to {len(samples)}")
    return [item for item in siblings if item.key.sample in samples[:size]]


@dataclass(frozen=True, kw_only=True)
class OptionForm:
    """An option to fill in: one of ``choices`` where there are any, else a value of the default's type."""

    name: str
    default: object
    choices: list[object]


def estimator_forms() -> dict[str, list[OptionForm]]:
    """Every estimator with its options; those of loaded plug-ins as well."""
    return {name: option_forms(name) for name in ESTIMATORS.names()}


def option_forms(estimator: str) -> list[OptionForm]:
    """The options of an estimator; ``default`` is None where there is none."""
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
