"""The estimators: one function each, from `EstimatorInputs` to `Advantages`. Importing this package registers them."""

from agentrl.algorithms.estimators import optimal, pooled, scalar, token

__all__ = ["optimal", "pooled", "scalar", "token"]
