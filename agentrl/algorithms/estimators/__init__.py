"""Estimators: functions from `EstimatorInputs` to `Advantages`. Importing this package registers them."""

from agentrl.algorithms.estimators import classic, optimal

__all__ = ["classic", "optimal"]
