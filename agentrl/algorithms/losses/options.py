"""The options of the losses: defaults and valid values."""

import math
from dataclasses import dataclass

from agentrl.algorithms.errors import InvalidOptionError
from agentrl.algorithms.validation import check_fraction, check_order, check_positive, check_range, is_number


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """The interval [1 - clip_low, 1 + clip_high] outside which a ratio earns nothing more."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0, 1.0)
        check_range("clip_high", self.clip_high, 0.0)


@dataclass(frozen=True, kw_only=True)
class DualClipOptions(ClipOptions):
    """ClipOptions, and the bound on the ratio of tokens with a negative advantage."""

    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.dual_clip) and 1.0 < self.dual_clip < math.inf):
            raise InvalidOptionError(f"dual_clip={self.dual_clip!r} must be greater than 1 and finite")


@dataclass(frozen=True, kw_only=True)
class SequenceClipOptions(ClipOptions):
    """ClipOptions for the ratio of a whole sequence, which lies much closer to 1; defaults of the paper."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4


@dataclass(frozen=True, kw_only=True)
class WeightClipOptions(ClipOptions):
    """ClipOptions for a ratio used as a weight: by default no lower bound, and at most 5 (arXiv 2510.13786)."""

    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(frozen=True, kw_only=True)
class LogClipOptions:
    """The interval [-clip_low, clip_high] for the *logarithm* of the ratio; defaults of the paper."""

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0)
        check_range("clip_high", self.clip_high, 0.0)


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The steepness t of the gate for tokens with positive and with other advantages."""

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def __post_init__(self) -> None:
        check_positive("temperature_positive", self.temperature_positive)
        check_positive("temperature_negative", self.temperature_negative)


@dataclass(frozen=True, kw_only=True)
class ProbabilityClipOptions:
    """How far a token's probability may rise (clip_high) or fall (clip_low) before it earns nothing more."""

    clip_low: float = 0.15
    clip_high: float = 0.15

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0, 1.0)
        check_range("clip_high", self.clip_high, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DivergenceClipOptions:
    """How far, in nats of the binary KL, a token may rise (clip_high) or fall (clip_low) before it earns nothing."""

    clip_low: float = 0.05
    clip_high: float = 0.05

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0)
        check_range("clip_high", self.clip_high, 0.0)


@dataclass(frozen=True, kw_only=True)
class ClipCovarianceOptions(ClipOptions):
    """ClipOptions, the share of tokens to drop, and the open interval of covariances to draw them from."""

    covariance_fraction: float = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("covariance_fraction", self.covariance_fraction)
        check_order("covariance_low", self.covariance_low, "covariance_high", self.covariance_high)


@dataclass(frozen=True, kw_only=True)
class KLCovarianceOptions:
    """The share of tokens, largest covariance first, that are held back, and how strongly."""

    covariance_fraction: float = 2e-4
    kl_coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_fraction("covariance_fraction", self.covariance_fraction)
        check_range("kl_coefficient", self.kl_coefficient, 0.0)
