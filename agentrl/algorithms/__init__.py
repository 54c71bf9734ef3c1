"""Algorithms: pure functions on tensors, from rewards to the loss. torch and the standard library only."""

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.aggregation import AGGREGATIONS, aggregate, loss_normalizer
from agentrl.algorithms.baselines import TAILS
from agentrl.algorithms.correction import mismatch_metrics
from agentrl.algorithms.diagnostics import HeadVariance, HeadVarianceAccumulator, diagonal_proxy, diagonal_proxy_power
from agentrl.algorithms.energy import ENERGIES, cross_energy, logit_proxy_energy, realized_energy
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
    EstimatorNeeds,
    Rollouts,
    ScalarOptions,
    TokenBaselineOptions,
    estimator_needs,
    register_estimator,
)
from agentrl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from agentrl.algorithms.losses import (
    LOSSES,
    ClipOptions,
    DualClipOptions,
    LossInputs,
    PolicyLoss,
    policy_loss,
    register_loss,
)
from agentrl.algorithms.normalization import NORMALIZATIONS
from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.algorithms.registry import NoOptions

__all__ = [
    "AGGREGATIONS",
    "ENERGIES",
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "LOSSES",
    "NORMALIZATIONS",
    "TAILS",
    "AdvantageInputs",
    "Advantages",
    "AlgorithmError",
    "ClipOptions",
    "DualClipOptions",
    "Estimate",
    "EstimatorNeeds",
    "HeadVariance",
    "HeadVarianceAccumulator",
    "InvalidInputError",
    "InvalidOptionError",
    "LossInputs",
    "MissingInputError",
    "NoOptions",
    "PolicyLoss",
    "Rollouts",
    "ScalarOptions",
    "TokenBaselineOptions",
    "UnknownNameError",
    "aggregate",
    "compute_advantages",
    "cross_energy",
    "diagonal_proxy",
    "diagonal_proxy_power",
    "estimator_needs",
    "kl_penalty",
    "logit_proxy_energy",
    "loss_normalizer",
    "mismatch_metrics",
    "policy_loss",
    "realized_energy",
    "register_estimator",
    "register_loss",
]
