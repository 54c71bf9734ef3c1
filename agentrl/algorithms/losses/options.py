"""Options of the losses."""

import math
from dataclasses import dataclass

from agentrl.algorithms.errors import InvalidOptionError
from agentrl.algorithms.registry import Options, option
from agentrl.algorithms.validation import check_fraction, check_order, check_positive, check_range, is_number


@dataclass(frozen=True, kw_only=True)
class ClipOptions(Options):
    """The interval [1 - clip_low, 1 + clip_high] outside which a ratio earns nothing more."""

    clip_low: float = option(0.2, check_range, 0.0, 1.0)
    clip_high: float = option(0.2, check_range, 0.0)


def _check_above_one(name: str, value: object) -> None:
    if not (is_number(value) and 1.0 < value < math.inf):
        raise InvalidOptionError(f"{name}={value!r} must be greater than 1 and finite")


@dataclass(frozen=True, kw_only=True)
class DualClipOptions(ClipOptions):
    """ClipOptions, and the bound on the ratio of tokens with a negative advantage."""

    dual_clip: float = option(3.0, _check_above_one)


@dataclass(frozen=True, kw_only=True)
class SequenceClipOptions(ClipOptions):
    """ClipOptions for the ratio of a whole sequence, which lies much closer to 1; defaults of the paper."""

    clip_low: float = option(3e-4, check_range, 0.0, 1.0)
    clip_high: float = option(4e-4, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class WeightClipOptions(ClipOptions):
    """ClipOptions for a ratio used as a weight: by default no lower bound, and at most 5 (arXiv 2510.13786)."""

    clip_low: float = option(1.0, check_range, 0.0, 1.0)
    clip_high: float = option(4.0, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class LogClipOptions(Options):
    """The interval [-clip_low, clip_high] for the *logarithm* of the ratio; defaults of the paper."""

    clip_low: float = option(0.4, check_range, 0.0)
    clip_high: float = option(0.4, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """The steepness t of the gate for tokens with positive and with other advantages."""

    temperature_positive: float = option(1.0, check_positive)
    temperature_negative: float = option(1.05, check_positive)


@dataclass(frozen=True, kw_only=True)
class ProbabilityClipOptions(Options):
    """How far a token's probability may rise (clip_high) or fall (clip_low) before it earns nothing more."""

    clip_low: float = option(0.15, check_range, 0.0, 1.0)
    clip_high: float = option(0.15, check_range, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DivergenceClipOptions(Options):
    """How far, in nats of the binary KL, a token may rise (clip_high) or fall (clip_low) before it earns nothing."""

    clip_low: float = option(0.05, check_range, 0.0)
    clip_high: float = option(0.05, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class ClipCovarianceOptions(ClipOptions):
    """ClipOptions, the share of tokens to drop, and the open interval of covariances to draw them from."""

    covariance_fraction: float = option(2e-4, check_fraction)
    covariance_low: float = 1.0
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order("covariance_low", self.covariance_low, "covariance_high", self.covariance_high)


@dataclass(frozen=True, kw_only=True)
class KLCovarianceOptions(Options):
    """The share of tokens, largest covariance first, that are held back, and how strongly."""

    covariance_fraction: float = option(2e-4, check_fraction)
    kl_coefficient: float = option(1.0, check_range, 0.0)
