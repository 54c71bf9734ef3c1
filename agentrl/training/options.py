"""From the settings' flat names to the options that the chosen estimator and loss know."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms import ESTIMATORS, LOSSES
from agentrl.algorithms.errors import UnknownNameError
from agentrl.errors import SettingsError
from agentrl.training.settings import AlgorithmSettings

_ESTIMATOR_KEYS = ("gamma", "leave_one_out", "tail", "energy", "normalize")
_LOSS_KEYS = ("clip_low", "clip_high", "dual_clip")


def estimator_options(settings: AlgorithmSettings) -> dict[str, Any]:
    """Options of ``settings.estimator``; a setting that it does not know and that was changed is an error."""
    options = _options(settings, "estimator", settings.estimator, ESTIMATORS, _ESTIMATOR_KEYS)
    if "loss_aggregation" in ESTIMATORS.option_names(settings.estimator):
        # An optimal baseline weighs tokens as the loss does (FORMULAS: section 4).
        options["loss_aggregation"] = settings.aggregation
    return options


def loss_options(settings: AlgorithmSettings) -> dict[str, Any]:
    """Options of ``settings.loss``."""
    return _options(settings, "loss", settings.loss, LOSSES, _LOSS_KEYS)


def _options(settings: AlgorithmSettings, kind: str, name: str, registry: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        known = set(registry.option_names(name))
    except UnknownNameError as error:
        raise SettingsError(f"algorithm.{kind}={name}: {error}") from error
    for key in keys:
        default = AlgorithmSettings.model_fields[key].default
        if key not in known and key in settings.model_fields_set and getattr(settings, key) != default:
            raise SettingsError(
                f"algorithm.{key}={getattr(settings, key)}: the {kind} {name!r} has no such option; "
                f"it has: {', '.join(sorted(known)) or 'none'}"
            )
    return {key: getattr(settings, key) for key in keys if key in known}
