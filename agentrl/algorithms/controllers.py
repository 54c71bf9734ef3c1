"""The coefficient beta of a KL penalty: constant, or steered towards a target (docs/formulas.md 5)."""

import math
from typing import Protocol

from agentrl.algorithms.bounds import check_positive, check_range
from agentrl.algorithms.errors import InvalidInputError

_STEP_LIMIT = 0.2


class KLController(Protocol):
    """What gives the coefficient of this step and learns how far the policy was from its reference."""

    beta: float

    def update(self, kl: float, trajectories: int) -> None:
        """Take the mean KL of a step's tokens and how many trajectories the step had."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to keep."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""


class FixedKL:
    """Always the same beta."""

    def __init__(self, beta: float) -> None:
        check_range("beta", beta, 0.0)
        self.beta = beta

    def update(self, kl: float, trajectories: int) -> None:
        """Change nothing."""
        _check_measurement(kl, trajectories)

    def state_dict(self) -> dict[str, float]:
        """{"beta": ...}"""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing: a fixed beta is that of the settings, also after a resume with other settings."""


class AdaptiveKL:
    """beta *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon after a step of n trajectories (arXiv 1909.08593).

    >>> controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    >>> controller.update(0.2, trajectories=100)
    >>> round(controller.beta, 6)
    0.102
    """

    def __init__(self, beta: float, *, target: float, horizon: float) -> None:
        """beta: the first coefficient, positive (from 0 it could not move); horizon in trajectories."""
        check_positive("beta", beta)
        check_positive("target", target)
        check_positive("horizon", horizon)
        self.beta = beta
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, trajectories: int) -> None:
        """One step of proportional control; beta stays positive however large the step is."""
        _check_measurement(kl, trajectories)
        error = min(max(kl / self.target - 1, -_STEP_LIMIT), _STEP_LIMIT)
        factor = 1 + error * trajectories / self.horizon
        if factor <= 0:
            raise InvalidInputError(
                f"a step of {trajectories} trajectories is too large for a KL horizon of {self.horizon:g}: "
                f"beta would become negative; the horizon must exceed a fifth of a step's trajectories"
            )
        self.beta *= factor

    def state_dict(self) -> dict[str, float]:
        """{"beta": ...}"""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take beta; target and horizon are those of the settings."""
        check_positive("beta", state["beta"])
        self.beta = state["beta"]


def _check_measurement(kl: float, trajectories: int) -> None:
    if not math.isfinite(kl) or trajectories < 0:
        raise InvalidInputError(f"kl must be finite and trajectories not negative; got {kl}, {trajectories}")
