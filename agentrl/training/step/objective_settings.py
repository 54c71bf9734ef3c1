"""The settings that say what a step minimises, put together and resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.algorithms import AlgorithmError, UnknownNameError, check_aggregation, default_aggregation
from agentrl.errors import SettingsError
from agentrl.training.settings import AlgorithmSettings, CorrectionSettings, KLSettings, RewardSettings

if TYPE_CHECKING:
    from agentrl.config import Settings


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """``response_tokens`` is what lengths are set to that are left open: rollout.max_response_tokens."""

    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    response_tokens: int

    @classmethod
    def of(cls, settings: Settings) -> ObjectiveSettings:
        """From the settings of a run."""
        return cls(
            algorithm=settings.algorithm,
            reward=settings.reward,
            kl=settings.kl,
            correction=settings.correction,
            response_tokens=settings.rollout.max_response_tokens,
        )

    @property
    def aggregation(self) -> str:
        """The one that is set, or that of the loss and the estimator.

        Raises SettingsError if there is no such loss, or it forbids the aggregation.
        """
        algorithm = self.algorithm
        try:
            default = default_aggregation(algorithm.loss, algorithm.estimator)
        except UnknownNameError as error:
            raise SettingsError(f"algorithm.loss={algorithm.loss}: {error}") from error
        if algorithm.aggregation is None:
            return default
        try:
            check_aggregation(algorithm.loss, algorithm.aggregation)
        except AlgorithmError as error:
            raise SettingsError(f"algorithm.aggregation={algorithm.aggregation}: {error}") from error
        return algorithm.aggregation

    @property
    def norm_length(self) -> int:
        """The constant L of seq_mean_token_sum_norm."""
        return self.algorithm.norm_length or self.response_tokens

    @property
    def overlong_limit(self) -> int:
        """Model tokens from which the soft penalty for length is full."""
        return self.reward.overlong_limit or self.response_tokens
