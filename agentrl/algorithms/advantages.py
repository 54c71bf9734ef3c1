"""compute_advantages: from the rewards of grouped trajectories to one number a token."""

import torch

from agentrl.algorithms.errors import InvalidInputError
from agentrl.algorithms.estimators import ESTIMATORS, Estimate, Rollouts
from agentrl.algorithms.normalization import normalize_by_group, whiten
from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.algorithms.validation import as_mask, check_advantage_inputs, check_finite


@torch.no_grad()
def compute_advantages(estimator: str, inputs: AdvantageInputs, **options: object) -> Advantages:
    """Advantages, returns and baselines [B, T] of the named estimator, detached; 0 off the model tokens.

    Sums are in float64; the result is float32, or float64 if the rewards are. Options: the fields of the estimator's
    options record (`ESTIMATORS.option_names(name)`); what is left out has the record's default. All trajectories of a
    group must be in one call. `normalize="whiten"` takes the rows of this call for the whole: pass the rows of all
    ranks.

    Raises UnknownNameError, InvalidOptionError, MissingInputError, InvalidInputError.
    """
    entry = ESTIMATORS[estimator]
    record = entry.make_options(f"estimator {estimator!r}", options)
    check_advantage_inputs(inputs)
    mask = as_mask("response_mask", inputs.response_mask)
    if inputs.importance_weights is not None:
        check_finite("importance_weights", inputs.importance_weights, mask)
    rollouts = Rollouts.of(inputs, mask)
    estimate = entry.function(rollouts, record)
    return _finish(estimate, rollouts, getattr(record, "normalize", None))


def _finish(estimate: Estimate, rollouts: Rollouts, normalize: str | None) -> Advantages:
    mask = rollouts.mask
    dtype = torch.float64 if rollouts.inputs.rewards.dtype == torch.float64 else torch.float32
    advantages = torch.where(mask, estimate.advantages, 0.0)
    if normalize == "group_std":
        advantages = normalize_by_group(advantages, mask, rollouts.labels, rollouts.groups)
    elif normalize == "whiten":
        advantages = whiten(advantages, mask)
    if not bool(torch.isfinite(advantages).all()):
        row, position = (~torch.isfinite(advantages)).nonzero()[0].tolist()
        raise InvalidInputError(f"the advantage in row {row} at position {position} is not finite: check the energies")
    return Advantages(
        advantages=advantages.to(dtype),
        returns=torch.where(mask, estimate.returns, 0.0).to(dtype),
        baselines=torch.where(mask, estimate.baselines, 0.0).to(dtype),
    )
