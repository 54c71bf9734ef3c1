"""The fidelity gate: the engine and the trainer must be the same policy."""

from __future__ import annotations

from agentrl.errors import AgentRLError

BOUNDS = {"float32": 1e-3, "bfloat16": 3e-2}
"""Mean absolute difference (nats) by the dtype of the weights. In float32 the mean of each trajectory is held to it."""


class FidelityError(AgentRLError):
    """Training log-probabilities differ from the engine's on tokens the trained version sampled."""


def check_fidelity(mean_difference: float, bound: float, *, worst: float | None = None) -> None:
    """Raise unless the mean absolute difference of log-probabilities is within ``bound`` (nats).

    ``worst`` is that mean of the trajectory that is furthest off; None where rounding alone may move one that far.
    """
    for difference, where in ((mean_difference, "on average"), (worst, "on average over one trajectory")):
        if difference is not None and not difference <= bound:  # NaN included
            raise FidelityError(
                f"the training forward and the engine disagree on the log-probability of sampled tokens by "
                f"{difference:.3g} nats {where} (bound {bound:g}). Possible causes: another temperature, template or "
                "tokenizer on one side, weights that were not transferred, or another dtype. The step was not applied."
            )
