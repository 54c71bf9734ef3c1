"""What is computed in which pass.

One forward can serve statistics, advantages and the backward pass when everything an advantage needs lies in one
micro-batch and the loss mask is known beforehand. Otherwise a statistics pass comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.training.settings import AlgorithmSettings


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """``one_forward`` or the ``reasons`` why a statistics pass is needed."""

    one_forward: bool
    reasons: tuple[str, ...]

    def describe(self) -> str:
        """One line for the console and ``--dry-run``."""
        if self.one_forward:
            return "one forward for statistics, advantages and backward (micro-batches of whole groups)"
        return "a statistics pass, then the training pass: " + "; ".join(self.reasons)


def plan_passes(settings: AlgorithmSettings, *, group_tokens: int, budget: int) -> PassPlan:
    """Decide from the settings; ``group_tokens`` is the largest group's padded size, ``budget`` a micro-batch's."""
    reasons = []
    if settings.updates_per_step > 1:
        reasons.append(
            f"{settings.updates_per_step} updates on the same trajectories need the log-probabilities before"
        )
    if settings.normalize == "whiten":
        reasons.append("whitening takes the mean over the whole step")
    if group_tokens > budget:
        reasons.append(
            f"a group of {group_tokens} tokens does not fit one micro-batch (training.micro_batch_tokens={budget})"
        )
    return PassPlan(one_forward=not reasons, reasons=tuple(reasons))
