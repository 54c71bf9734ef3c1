"""From the settings' flat names to the options that the chosen estimator and loss know, and what they need."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms import ESTIMATORS, LOSSES, EstimatorNeeds, estimator_needs
from agentrl.algorithms.errors import AlgorithmError, UnknownNameError
from agentrl.errors import SettingsError
from agentrl.training.settings import AlgorithmSettings
from agentrl.training.step.objective_settings import ObjectiveSettings

_ESTIMATOR_KEYS = ("gamma", "lam", "leave_one_out", "tail", "energy", "normalize")
_LOSS_KEYS = ("clip_low", "clip_high", "dual_clip")
_LABORATORY_INPUTS = ("cross_energy",)


def estimator_options(settings: ObjectiveSettings) -> dict[str, Any]:
    """Options of ``algorithm.estimator``; a setting that it does not know and that was changed is an error."""
    algorithm = settings.algorithm
    options = _options(algorithm, "estimator", ESTIMATORS, _ESTIMATOR_KEYS, algorithm.estimator_options)
    if "loss_aggregation" in ESTIMATORS.option_names(algorithm.estimator):
        # An optimal baseline weighs tokens as the loss does (docs/formulas.md 4).
        options.setdefault("loss_aggregation", settings.aggregation)
    return options


def loss_options(settings: ObjectiveSettings) -> dict[str, Any]:
    """Options of ``algorithm.loss``, as :func:`estimator_options`."""
    return _options(settings.algorithm, "loss", LOSSES, _LOSS_KEYS, settings.algorithm.loss_options)


def needs(settings: ObjectiveSettings) -> EstimatorNeeds:
    """What the estimator asks of the trainer. Raises SettingsError for what no trainer can give."""
    name = settings.algorithm.estimator
    found = estimator_needs(name, **estimator_options(settings))
    missing = sorted(found.inputs.intersection(_LABORATORY_INPUTS))
    if missing:
        raise SettingsError(
            f"algorithm.estimator={name}: it needs {', '.join(missing)}, which training does not compute: it is for "
            "the variance laboratory alone"
        )
    return found


def _options(
    settings: AlgorithmSettings, kind: str, registry: Any, keys: tuple[str, ...], further: dict[str, Any]
) -> dict[str, Any]:
    name = getattr(settings, kind)
    try:
        known = set(registry.option_names(name))
    except UnknownNameError as error:
        raise SettingsError(f"algorithm.{kind}={name}: {error}") from error
    changed = {key: getattr(settings, key) for key in keys if _is_changed(settings, key)}
    for key, value in changed.items():
        if key not in known:
            raise SettingsError(
                f"algorithm.{key}={value}: the {kind} {name!r} has no such option; "
                f"it has: {', '.join(sorted(known)) or 'none'}"
            )
        if key in further:
            raise SettingsError(f"algorithm.{key}={value} and algorithm.{kind}_options.{key}={further[key]}: give one")
    options = changed | further
    try:
        registry[name].make_options(f"{kind} {name!r}", options)
    except AlgorithmError as error:
        raise SettingsError(f"algorithm.{kind}={name}: {error}") from error
    return options


def _is_changed(settings: AlgorithmSettings, key: str) -> bool:
    return bool(getattr(settings, key) != AlgorithmSettings.model_fields[key].default)
