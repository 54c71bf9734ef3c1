"""Algorithms: pure functions on tensors, from rewards to the loss. torch and the standard library only."""

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.aggregation import AGGREGATIONS, aggregate, loss_normalizer
from agentrl.algorithms.baselines import TAILS
from agentrl.algorithms.controllers import AdaptiveKL, FixedKL, KLController
from agentrl.algorithms.correction import (
    DIVERGENCE_LEVELS,
    DIVERGENCES,
    RATIO_LEVELS,
    WEIGHT_BOUNDS,
    Correction,
    CorrectionOptions,
    correction_options,
    correction_sums,
    rollout_correction,
)
from agentrl.algorithms.critic import ValueLoss, value_loss
from agentrl.algorithms.diagnostics import HeadVariance, HeadVarianceAccumulator, diagonal_proxy, diagonal_proxy_power
from agentrl.algorithms.energy import ENERGIES, logit_proxy_energy, realized_energy
from agentrl.algorithms.entropy import entropy_bonus
from agentrl.algorithms.errors import (
    AlgorithmError,
    InvalidInputError,
    InvalidOptionError,
    MissingInputError,
    UnknownNameError,
)
from agentrl.algorithms.estimators import (
    ESTIMATORS,
    Estimate,
    Rollouts,
    ScalarOptions,
    TokenBaselineOptions,
    register_estimator,
)
from agentrl.algorithms.kl import KL_ESTIMATORS, REWARD_KL_ESTIMATORS, RewardKL, kl_penalty, reward_kl
from agentrl.algorithms.losses import (
    LOSSES,
    ClipCovarianceOptions,
    ClipOptions,
    DivergenceClipOptions,
    DualClipOptions,
    GateOptions,
    KLCovarianceOptions,
    LogClipOptions,
    LossInputs,
    LossTraits,
    PolicyLoss,
    ProbabilityClipOptions,
    SequenceClipOptions,
    WeightClipOptions,
    check_aggregation,
    default_aggregation,
    policy_loss,
    register_loss,
    step_selection,
)
from agentrl.algorithms.mismatch import mismatch_metrics, perplexity_metrics
from agentrl.algorithms.normalization import NORMALIZATIONS
from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.algorithms.registry import NoOptions
from agentrl.algorithms.rewards import add_at_last_token, overlong_penalty

__all__ = [
    "AGGREGATIONS",
    "DIVERGENCES",
    "DIVERGENCE_LEVELS",
    "ENERGIES",
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "LOSSES",
    "NORMALIZATIONS",
    "RATIO_LEVELS",
    "REWARD_KL_ESTIMATORS",
    "TAILS",
    "WEIGHT_BOUNDS",
    "AdaptiveKL",
    "AdvantageInputs",
    "Advantages",
    "AlgorithmError",
    "ClipCovarianceOptions",
    "ClipOptions",
    "Correction",
    "CorrectionOptions",
    "DivergenceClipOptions",
    "DualClipOptions",
    "Estimate",
    "FixedKL",
    "GateOptions",
    "HeadVariance",
    "HeadVarianceAccumulator",
    "InvalidInputError",
    "InvalidOptionError",
    "KLController",
    "KLCovarianceOptions",
    "LogClipOptions",
    "LossInputs",
    "LossTraits",
    "MissingInputError",
    "NoOptions",
    "PolicyLoss",
    "ProbabilityClipOptions",
    "RewardKL",
    "Rollouts",
    "ScalarOptions",
    "SequenceClipOptions",
    "TokenBaselineOptions",
    "UnknownNameError",
    "ValueLoss",
    "WeightClipOptions",
    "add_at_last_token",
    "aggregate",
    "check_aggregation",
    "compute_advantages",
    "correction_options",
    "correction_sums",
    "default_aggregation",
    "diagonal_proxy",
    "diagonal_proxy_power",
    "entropy_bonus",
    "kl_penalty",
    "logit_proxy_energy",
    "loss_normalizer",
    "mismatch_metrics",
    "overlong_penalty",
    "perplexity_metrics",
    "policy_loss",
    "realized_energy",
    "register_estimator",
    "register_loss",
    "reward_kl",
    "rollout_correction",
    "step_selection",
    "value_loss",
]
