"""compute_advantages: from the rewards of grouped trajectories to one number a token."""

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError
from agentrl.algorithms.estimators.calls import ONE_CALL, Calls
from agentrl.algorithms.estimators.inputs import EstimatorInputs, blocks_of_rows, take_rows
from agentrl.algorithms.estimators.normalization import Moments, normalize_by_group
from agentrl.algorithms.estimators.registry import ESTIMATORS, EstimatorEntry
from agentrl.algorithms.estimators.rows.rollouts import RolloutRows
from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.algorithms.validation import as_mask, check_shapes


@torch.no_grad()
def compute_advantages(
    estimator: str,
    inputs: AdvantageInputs,
    *,
    calls: Calls | None = None,
    **options: object,
) -> Advantages:
    """Advantages, returns and baselines [B, T] of the named estimator, detached; 0 off the model tokens.

    Sums are in float64; the result is float32, or float64 if the rewards are. Options: the fields of the estimator's
    options record. All trajectories of a group must be in one call; where `estimator_needs(...).step_wide` (whitening,
    pooled baselines, and gpg's c) the rows of the whole optimizer step, of all ranks. Unless the estimator's span is
    "step", the groups may lie in a call of each rank, if `calls` brings these together; a rank without groups calls
    with no rows.

    Raises UnknownNameError, InvalidOptionError, MissingInputError, InvalidInputError.
    """
    entry = ESTIMATORS[estimator]
    record = entry.make_options(f"estimator {estimator!r}", options)
    check_shapes(inputs)
    entry.check_inputs(estimator, inputs)
    inputs = replace(inputs, response_mask=as_mask("response_mask", inputs.response_mask))
    if inputs.loss_mask is not None:
        inputs = replace(inputs, loss_mask=as_mask("loss_mask", inputs.loss_mask))
    rollouts = RolloutRows.of(inputs)
    if rollouts is None:
        return _in_blocks(entry, record, inputs, calls)
    return rollouts.split(_in_blocks(entry, record, rollouts.merged(inputs), calls))


def _in_blocks(entry: EstimatorEntry, record: object, inputs: AdvantageInputs, calls: Calls | None) -> Advantages:
    normalize = getattr(record, "normalize", None)
    dtype = torch.float64 if inputs.rewards.dtype == torch.float64 else torch.float32
    shape, device = inputs.rewards.shape, inputs.rewards.device
    raw = torch.empty(shape, dtype=torch.float64 if normalize == "whiten" else dtype, device=device)
    returns, baselines = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    blocks = list(blocks_of_rows(inputs))
    takes_part = entry.span == "ranks" and calls is not None  # also without rows: the other calls wait for its sums
    at_once = takes_part or (bool(blocks) and entry.span != "group")
    whole = entry.function(EstimatorInputs.of(inputs, calls=calls or ONE_CALL), record) if at_once else None
    moments = Moments.nothing(raw)
    for rows in blocks:
        block = EstimatorInputs.of(take_rows(inputs, rows), rows)
        estimate = entry.function(block, record) if whole is None else whole.take(rows)
        _ = block.loss_ratio  # weights that are given must be right, also where the estimator does not use them
        advantages = _advantages(estimate, block, normalize)
        if normalize == "whiten":
            moments = moments.merge(Moments.of(advantages, block.mask))
        raw[rows] = advantages.to(raw.dtype)
        returns[rows] = estimate.returns.to(dtype).masked_fill(~block.mask, 0.0)
        baselines[rows] = estimate.baselines.to(dtype).masked_fill(~block.mask, 0.0)
    if normalize == "whiten":
        moments = moments if calls is None else moments.over_step(calls)
        raw = _whiten(raw, inputs.response_mask, moments, blocks, dtype)
    return Advantages(advantages=raw.to(dtype), returns=returns, baselines=baselines)


def _advantages(estimate: Advantages, block: EstimatorInputs, normalize: str | None) -> Tensor:
    """[b, T] float64, 0 off the mask, all but whitened."""
    mask = block.mask
    advantages = estimate.advantages.masked_fill(~mask, 0.0)
    if normalize == "group_std":
        advantages = normalize_by_group(advantages, mask, block.groups)
    if not bool(torch.isfinite(advantages.sum())):
        bad = ~torch.isfinite(advantages)
        if bool(bad.any()):
            row, position = bad.nonzero()[0].tolist()
            raise InvalidInputError(
                f"the advantage in row {int(block.rows[row])} at position {position} is not finite: check the energies"
            )
    return advantages


def _whiten(raw: Tensor, mask: Tensor, moments: Moments, blocks: list[Tensor], dtype: torch.dtype) -> Tensor:
    whitened = torch.empty(raw.shape, dtype=dtype, device=raw.device)
    for rows in blocks:
        whitened[rows] = moments.whiten(raw[rows], mask[rows]).to(dtype)
    return whitened
