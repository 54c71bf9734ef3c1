"""What is computed in which pass.

One forward can serve statistics, advantages and the backward pass when everything an advantage needs lies in one
micro-batch and the loss mask is known beforehand. Otherwise a statistics pass comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.algorithms import LOSSES
from agentrl.training.step.objective_options import needs
from agentrl.training.step.objective_settings import ObjectiveSettings


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


def plan_passes(settings: ObjectiveSettings, *, group_tokens: int, budget: int) -> PassPlan:
    """Decide from the settings; ``group_tokens`` is the largest group's padded size, ``budget`` a micro-batch's.

    Raises SettingsError if the estimator cannot have the settings' options.
    """
    reasons = list(_reasons(settings))
    if group_tokens > budget:
        reasons.append(
            f"a group of {group_tokens} tokens does not fit one micro-batch (training.micro_batch_tokens={budget})"
        )
    return PassPlan(one_forward=not reasons, reasons=tuple(reasons))


def _reasons(settings: ObjectiveSettings) -> Iterator[str]:
    algorithm, correction = settings.algorithm, settings.correction
    needed = needs(settings)
    if algorithm.updates_per_step > 1:
        yield f"{algorithm.updates_per_step} updates on the same trajectories need the log-probabilities before"
    if needed.step_wide:
        yield needed.reason
    if "values" in needed.inputs:
        yield "the critic's values are those before its update"
    if "trajectory_energy" in needed.inputs:
        yield "exact energies take a forward and a backward of their own"
    if LOSSES.traits(algorithm.loss).step_wide:
        yield f"the loss {algorithm.loss} selects tokens over the whole step"
    if correction.self_normalize:
        yield "self-normalised weights take the mean over the whole step (correction.self_normalize)"
    if correction.masks:
        yield "the loss mask depends on the log-probabilities (correction.ratio_mask, correction.divergence_mask)"
