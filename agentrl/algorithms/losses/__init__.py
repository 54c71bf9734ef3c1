"""Policy losses: one pure function each, per token (docs/formulas.md 5).

Add one with the decorator; its options are the fields of a frozen dataclass:

    @register_loss("mine", options=ClipOptions, traits=LossTraits(aggregation="token_mean"))
    def mine(inputs: LossInputs, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]: ...
"""

from agentrl.algorithms.losses import clip, covariance, divergence, sequence
from agentrl.algorithms.losses.compute import check_aggregation, default_aggregation, policy_loss, step_selection
from agentrl.algorithms.losses.options import (
    ClipCovarianceOptions,
    ClipOptions,
    DivergenceClipOptions,
    DualClipOptions,
    GateOptions,
    KLCovarianceOptions,
    LogClipOptions,
    ProbabilityClipOptions,
    SequenceClipOptions,
    WeightClipOptions,
)
from agentrl.algorithms.losses.records import LOSSES, LossInputs, LossTraits, PolicyLoss, register_loss

__all__ = [
    "LOSSES",
    "ClipCovarianceOptions",
    "ClipOptions",
    "DivergenceClipOptions",
    "DualClipOptions",
    "GateOptions",
    "KLCovarianceOptions",
    "LogClipOptions",
    "LossInputs",
    "LossTraits",
    "PolicyLoss",
    "ProbabilityClipOptions",
    "SequenceClipOptions",
    "WeightClipOptions",
    "check_aggregation",
    "clip",
    "covariance",
    "default_aggregation",
    "divergence",
    "policy_loss",
    "register_loss",
    "sequence",
    "step_selection",
]
