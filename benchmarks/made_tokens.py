"""Token statistics of a trajectory that nobody played, of the size of real ones."""

from __future__ import annotations

import numpy as np

from agentrl.telemetry.tokens.trajectory_tokens import TrajectoryTokens

GROUP = 8


def made_tokens(number: int, length: int, draw: np.random.Generator, *, loss_weight: float) -> TrajectoryTokens:
    """Those of the ``number``-th trajectory of a step, of ``length`` model tokens; groups are of eight."""
    probability = draw.beta(5, 1, length).astype(np.float32)
    returns = np.full(length, number % 2, dtype=np.float32)
    baselines = (0.5 + 0.1 * np.cumsum(draw.normal(size=length)) / length).astype(np.float32)
    return TrajectoryTokens(
        group=number // GROUP,
        sample=number % GROUP,
        branch=0,
        parent=-1,
        fork=0,
        share=1.0,
        update=0,
        loss_weight=loss_weight,
        log_probs=np.log(probability),
        entropy=(1 - probability).astype(np.float16),
        energy=(1 - probability) ** 2,
        rewards=np.zeros(length, dtype=np.float32),
        returns=returns,
        baselines=baselines,
        advantages=returns - baselines,
        loss_mask=np.ones(length, dtype=bool),
    )
