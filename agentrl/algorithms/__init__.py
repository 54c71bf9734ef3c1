"""Algorithms: pure functions on tensors, from rewards to the loss. Imports only torch and the standard library."""

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.correction import (
    DIVERGENCE_LEVELS,
    DIVERGENCES,
    RATIO_LEVELS,
    WEIGHT_BOUNDS,
    Correction,
    CorrectionOptions,
    correction_options,
    correction_weight_sums,
    mismatch_metrics,
    perplexity_metrics,
    rollout_correction,
)
from agentrl.algorithms.diagnostics import HeadVariance, HeadVarianceAccumulator, diagonal_proxy
from agentrl.algorithms.estimators.baselines import ENERGIES, TAILS, logit_proxy_energy
from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.registry import (
    ESTIMATORS,
    NORMALIZATIONS,
    EstimatorNeeds,
    ScalarOptions,
    TokenBaselineOptions,
    estimator_needs,
    register_estimator,
)
from agentrl.algorithms.kl import (
    KL_ESTIMATORS,
    REWARD_KL_ESTIMATORS,
    AdaptiveKL,
    FixedKL,
    KLController,
    kl_penalty,
)
from agentrl.algorithms.losses.compute import (
    check_aggregation,
    default_aggregation,
    policy_loss,
    step_selection,
    value_loss,
)
from agentrl.algorithms.losses.formulas import (
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
from agentrl.algorithms.losses.registry import (
    AGGREGATIONS,
    LOSSES,
    LossInputs,
    LossTraits,
    aggregate,
    loss_normalizer,
    register_loss,
    token_factors,
)
from agentrl.algorithms.options import (
    AlgorithmError,
    InvalidInputError,
    InvalidOptionError,
    MissingInputError,
    NoOptions,
    UnknownNameError,
)
from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.algorithms.rewards import RewardKL, add_at_last_token, overlong_penalty, reward_kl

__all__ = [
    "AGGREGATIONS", "DIVERGENCES", "DIVERGENCE_LEVELS", "ENERGIES", "ESTIMATORS", "KL_ESTIMATORS", "LOSSES",
    "NORMALIZATIONS", "RATIO_LEVELS", "REWARD_KL_ESTIMATORS", "TAILS", "WEIGHT_BOUNDS", "AdaptiveKL", "AdvantageInputs",
    "Advantages", "AlgorithmError", "ClipCovarianceOptions", "ClipOptions", "Correction", "CorrectionOptions",
    "DivergenceClipOptions", "DualClipOptions", "EstimatorInputs", "EstimatorNeeds", "FixedKL", "GateOptions",
    "HeadVariance", "HeadVarianceAccumulator", "InvalidInputError", "InvalidOptionError", "KLController",
    "KLCovarianceOptions", "LogClipOptions", "LossInputs", "LossTraits", "MissingInputError", "NoOptions",
    "ProbabilityClipOptions", "RewardKL", "ScalarOptions", "SequenceClipOptions", "TokenBaselineOptions",
    "UnknownNameError", "WeightClipOptions", "add_at_last_token", "aggregate", "check_aggregation",
    "compute_advantages", "correction_options", "correction_weight_sums", "default_aggregation",
    "diagonal_proxy", "estimator_needs", "kl_penalty", "logit_proxy_energy", "loss_normalizer", "mismatch_metrics",
    "overlong_penalty", "perplexity_metrics", "policy_loss", "register_estimator", "register_loss", "reward_kl",
    "rollout_correction", "step_selection", "token_factors", "value_loss",
]  # fmt: skip
