"""Resolve the settings of a step's objective into the estimator's and the loss's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agentrl.algorithms import (
    ESTIMATORS,
    LOSSES,
    AlgorithmError,
    EstimatorNeeds,
    UnknownNameError,
    check_aggregation,
    default_aggregation,
    estimator_needs,
    policy_loss,
)
from agentrl.algorithms.options import E, OptionsRegistry
from agentrl.errors import SettingsError
from agentrl.rollout.settings import RewardSettings
from agentrl.training.settings import AlgorithmSettings, CorrectionSettings, KLSettings, TeacherSettings

if TYPE_CHECKING:
    from agentrl.config import Settings

_ESTIMATOR_KEYS = ("gamma", "lam", "leave_one_out", "tail", "siblings", "sibling_pool", "energy", "normalize")
_LOSS_KEYS = ("clip_low", "clip_high", "dual_clip")
_REMOVED = {"otb_cross": "removed from training; the laboratory measures it: agentrl variance --estimators otb_cross"}
"""Removed names, with the message that replaces the error for unknown names."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The settings of a step's objective.

    ``response_tokens`` is rollout.max_response_tokens, the default of unset lengths. ``seed`` is the run's seed.
    """

    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    response_tokens: int
    seed: int = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> ObjectiveSettings:
        """Extract the settings of the objective from the settings of a run."""
        return cls(
            algorithm=settings.algorithm,
            reward=settings.reward,
            kl=settings.kl,
            teacher=settings.teacher,
            correction=settings.correction,
            response_tokens=settings.rollout.max_response_tokens,
            seed=settings.seed,
        )

    @property
    def aggregation(self) -> str:
        """The configured aggregation, or the default for the loss and the estimator.

        Raises SettingsError if the loss or estimator is unknown, or if the loss does not support the aggregation.
        """
        algorithm = self.algorithm
        _registry_entry("loss", LOSSES, algorithm.loss)
        _registry_entry("estimator", ESTIMATORS, algorithm.estimator)
        if algorithm.aggregation is None:
            return default_aggregation(algorithm.loss, algorithm.estimator)
        try:
            check_aggregation(algorithm.loss, algorithm.aggregation)
        except AlgorithmError as error:
            raise SettingsError(f"algorithm.aggregation={algorithm.aggregation}: {error}") from error
        return algorithm.aggregation

    @property
    def drops_zero_variance(self) -> bool:
        """True if groups with equal rewards are dropped, as configured or because they have no gradient."""
        configured = self.algorithm.drop_zero_variance
        return not ESTIMATORS[self.algorithm.estimator].equal_groups if configured is None else configured

    @property
    def norm_length(self) -> int:
        """The constant L of seq_mean_token_sum_norm."""
        return self.algorithm.norm_length or self.response_tokens

    @property
    def overlong_limit(self) -> int:
        """Number of model tokens at which the soft length penalty reaches its maximum."""
        return self.reward.overlong_limit or self.response_tokens


def estimator_options(settings: ObjectiveSettings) -> dict[str, Any]:
    """Return the options of ``algorithm.estimator``.

    Raises SettingsError for an invalid option, and for a setting that is not at its default but is not an option of the
    estimator.
    """
    algorithm = settings.algorithm
    options = _checked_options(algorithm, "estimator", ESTIMATORS, _ESTIMATOR_KEYS, algorithm.estimator_options)
    if "loss_aggregation" in ESTIMATORS.option_names(algorithm.estimator):
        # An optimal baseline weights tokens as the loss does (docs/reference/formulas.md 4).
        options.setdefault("loss_aggregation", settings.aggregation)
    return options


def loss_options(settings: ObjectiveSettings) -> dict[str, Any]:
    """Return the options of ``algorithm.loss``. Raises SettingsError as :func:`estimator_options` does.

    Calls the loss on one token. Raises SettingsError if the result does not meet the requirements of ``register_loss``.
    """
    name = settings.algorithm.loss
    options = _checked_options(settings.algorithm, "loss", LOSSES, _LOSS_KEYS, settings.algorithm.loss_options)
    zero, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    try:
        log_probs = zero.clone().requires_grad_()
        policy_loss(name, log_probs=log_probs, old_log_probs=None, advantages=zero, loss_mask=mask, **options)
    except AlgorithmError as error:
        raise SettingsError(f"algorithm.loss={name}: {error}") from error
    return options


def estimator_requirements(settings: ObjectiveSettings) -> EstimatorNeeds:
    """Return the inputs that the estimator needs. Raises SettingsError as :func:`estimator_options` does."""
    return estimator_needs(settings.algorithm.estimator, **estimator_options(settings))


def advantages_known_before_forward(settings: ObjectiveSettings) -> bool:
    """Return True if advantages follow from rewards alone, without the policy's log-probabilities."""
    needed = estimator_requirements(settings)
    penalty = settings.kl.coefficient and settings.kl.placement == "reward"
    # The greedy rollout's reward is known before the forward pass.
    # The rollout correction affects weighted estimators only.
    corrected = settings.correction.active and needed.weighted
    return not (needed.inputs - {"greedy_returns"} or corrected or penalty)


def _registry_entry(kind: str, registry: OptionsRegistry[E], name: str) -> E:
    """Return the entry of ``algorithm.KIND=name``. Raises SettingsError if the name is unknown."""
    try:
        return registry[name]
    except UnknownNameError as error:
        raise SettingsError(f"algorithm.{kind}={name}: {_REMOVED.get(name, error)}") from error


def _checked_options(
    settings: AlgorithmSettings,
    kind: str,
    registry: OptionsRegistry[Any],
    keys: tuple[str, ...],
    further: dict[str, Any],
) -> dict[str, Any]:
    name = getattr(settings, kind)
    entry = _registry_entry(kind, registry, name)
    known = set(registry.option_names(name))
    changed = settings.model_dump(include=set(keys), exclude_defaults=True)
    for key, value in changed.items():
        if key not in known:
            raise SettingsError(
                f"algorithm.{key}={value}: the {kind} {name!r} has no such option; "
                f"valid options: {', '.join(sorted(known)) or 'none'}"
            )
        if key in further:
            raise SettingsError(
                f"algorithm.{key}={value} and algorithm.{kind}_options.{key}={further[key]}: set only one"
            )
    options = changed | further
    try:
        entry.make_options(f"{kind} {name!r}", options)
    except (AlgorithmError, UnknownNameError) as error:
        raise SettingsError(f"algorithm.{kind}={name}: {error}") from error
    return options
