"""The fidelity gate: the engine and the trainer must be the same policy."""

from __future__ import annotations

import math

from agentrl.errors import AgentRLError

BOUNDS = {"float32": 1e-3, "bfloat16": 3e-2}


class FidelityError(AgentRLError):
    """Training log-probabilities differ from the engine's on tokens the trained version sampled."""


def check_fidelity(mean_difference: float, bound: float) -> None:
    """Raise unless the mean absolute difference of log-probabilities is within ``bound`` (nats)."""
    if math.isfinite(mean_difference) and mean_difference <= bound:
        return
    raise FidelityError(
        f"the training forward and the engine disagree on the log-probability of sampled tokens by "
        f"{mean_difference:.3g} nats on average (bound {bound:g}). Possible causes: another temperature, template or "
        "tokenizer on one side, weights that were not transferred, or another dtype. The step was not applied."
    )
