"""The estimators: one function each, from `EstimatorInputs` to `Advantages`; the modules register them on import."""

from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.estimators.optimal import eob, ogb, otb, otb_cross, otb_isolated, otb_total, tir_otb
from agentrl.algorithms.estimators.options import (
    CrossBaselineOptions,
    DiscountedOptions,
    ExactEnergyOptions,
    GaeOptions,
    GlobalBaselineOptions,
    ScalarOptions,
    TokenBaselineOptions,
    WeightedOptions,
    WhitenedOptions,
)
from agentrl.algorithms.estimators.registry import (
    ESTIMATORS,
    EstimatorEntry,
    EstimatorNeeds,
    estimator_needs,
    register_estimator,
)
from agentrl.algorithms.estimators.scalar import dr_grpo, gpg, grpo, opo, reinforce_pp_baseline, remax, rloo
from agentrl.algorithms.estimators.token import gae, reinforce_pp

__all__ = [
    "ESTIMATORS",
    "CrossBaselineOptions",
    "DiscountedOptions",
    "EstimatorEntry",
    "EstimatorInputs",
    "EstimatorNeeds",
    "ExactEnergyOptions",
    "GaeOptions",
    "GlobalBaselineOptions",
    "ScalarOptions",
    "TokenBaselineOptions",
    "WeightedOptions",
    "WhitenedOptions",
    "dr_grpo",
    "eob",
    "estimator_needs",
    "gae",
    "gpg",
    "grpo",
    "ogb",
    "opo",
    "otb",
    "otb_cross",
    "otb_isolated",
    "otb_total",
    "register_estimator",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "tir_otb",
]
