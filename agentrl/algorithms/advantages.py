"""compute_advantages: per-token advantages from the rewards of grouped trajectories, optionally normalized."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithms.estimators.branches import RolloutRowMapping
from agentrl.algorithms.estimators.forks import LeafRowMapping
from agentrl.algorithms.estimators.inputs import EstimatorInputs, blocks_of_whole_groups, select_rows
from agentrl.algorithms.estimators.registry import ESTIMATORS, EstimatorEntry
from agentrl.algorithms.options import InvalidInputError, to_bool_mask
from agentrl.algorithms.records import (
    LOCAL_COMMUNICATOR,
    AdvantageInputs,
    Advantages,
    Communicator,
    Groups,
    check_shapes,
)


@torch.no_grad()
def compute_advantages(
    estimator: str,
    inputs: AdvantageInputs,
    *,
    communicator: Communicator | None = None,
    **options: object,
) -> Advantages:
    """Compute advantages, returns and baselines [B, T] with the named estimator. They are 0 outside model tokens.

    The result is detached, and float32, or float64 if the rewards are. Sums are in float64. Options: the fields of the
    estimator's options record. All trajectories of a group must be in one call. If `estimator_needs(...).step_wide`
    (whitening, pooled baselines, and gpg's c), the rows of the whole optimizer step on all ranks must be in one call.
    Unless the estimator's span is "step", each rank may instead call this function with its own groups, and
    `communicator` connects these calls. A rank without groups passes no rows.

    Raises UnknownNameError for an unknown estimator or option, InvalidOptionError for an invalid option,
    MissingInputError for a missing input, and InvalidInputError for an invalid input.
    """
    entry = ESTIMATORS[estimator]
    record = entry.make_options(f"estimator {estimator!r}", options)
    check_shapes(inputs)
    entry.check_inputs(estimator, inputs)
    inputs = replace(inputs, response_mask=to_bool_mask("response_mask", inputs.response_mask))
    if inputs.loss_mask is not None:
        inputs = replace(inputs, loss_mask=to_bool_mask("loss_mask", inputs.loss_mask))
    leaves = LeafRowMapping.from_inputs(inputs)
    if leaves is not None and entry.by_column:
        raise InvalidInputError(f"estimator {estimator!r} has no baseline for forked rollouts: use tir_otb")
    rollouts = leaves or RolloutRowMapping.from_inputs(inputs)
    if rollouts is None:
        return _compute_by_blocks(entry, record, inputs, communicator)
    return rollouts.split_by_row(_compute_by_blocks(entry, record, rollouts.merge_rows(inputs), communicator))


def _compute_by_blocks(
    entry: EstimatorEntry, record: object, inputs: AdvantageInputs, calls: Communicator | None
) -> Advantages:
    normalize = getattr(record, "normalize", None)
    dtype = torch.float64 if inputs.rewards.dtype == torch.float64 else torch.float32
    shape, device = inputs.rewards.shape, inputs.rewards.device
    raw = torch.empty(shape, dtype=torch.float64 if normalize == "whiten" else dtype, device=device)
    returns, baselines = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    blocks = list(blocks_of_whole_groups(inputs))
    takes_part = entry.span == "ranks" and calls is not None  # even without rows: the other ranks wait for this rank
    at_once = takes_part or (bool(blocks) and entry.span != "group")
    whole = None
    if at_once:
        whole = entry.function(
            EstimatorInputs.from_inputs(inputs, communicator=calls or LOCAL_COMMUNICATOR, weighted=entry.weighted),
            record,
        )
    moments = Moments.empty(raw)
    for rows in blocks:
        block = EstimatorInputs.from_inputs(select_rows(inputs, rows), rows, weighted=entry.weighted)
        estimate = entry.function(block, record) if whole is None else whole.select_rows(rows)
        block.check_importance_weights()  # even if the estimator does not use the weights
        advantages = _check_and_normalize_by_group(estimate, block, normalize)
        if normalize == "whiten":
            moments = moments.merge(Moments.from_advantages(advantages, block.mask, block.groups.weights))
        raw[rows] = advantages.to(raw.dtype)
        returns[rows] = estimate.returns.to(dtype).masked_fill(~block.mask, 0.0)
        baselines[rows] = estimate.baselines.to(dtype).masked_fill(~block.mask, 0.0)
    if normalize == "whiten":
        moments = moments if calls is None else moments.all_reduce(calls)
        raw = _whiten(raw, inputs.response_mask, moments, blocks, dtype)
    return Advantages(advantages=raw.to(dtype), returns=returns, baselines=baselines)


def _check_and_normalize_by_group(estimate: Advantages, block: EstimatorInputs, normalize: str | None) -> Tensor:
    """Check an estimate and normalize it by group. Returns [b, T] float64 before whitening, 0 outside the mask."""
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


def normalize_by_group(advantages: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Compute A / (std + 1e-6) [B, T], with the unbiased std over the model tokens of the group's trajectories.

    A group of one trajectory is not changed.
    """
    counts = groups.broadcast_group_sum(mask.sum(-1).to(advantages.dtype))
    sums = groups.broadcast_group_sum(advantages.masked_fill(~mask, 0.0).sum(-1))
    centred = (advantages - (sums / counts).unsqueeze(-1)).masked_fill_(~mask, 0.0)
    squares = groups.broadcast_group_sum(centred.square_().sum(-1))
    divisor = (squares / (counts - 1).clamp(min=1)).sqrt() + 1e-6
    divisor = torch.where(groups.group_size_by_row > 1, divisor, 1.0)
    return (advantages / divisor.unsqueeze(-1)).masked_fill_(~mask, 0.0)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of advantages at model tokens, merged block by block."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def from_advantages(cls, advantages: Tensor, mask: Tensor, weights: Tensor | None = None) -> Moments:
        """Return the moments of advantages [b, T] at the mask's True entries. The mask must have a True entry.

        ``weights`` [b]: how often each row counts.
        """
        of_rows = advantages.new_ones(()) if weights is None else weights.to(advantages.dtype)
        count = (mask.sum(-1) * of_rows).sum().to(advantages.dtype)
        mean = (advantages.masked_fill(~mask, 0.0) * of_rows.unsqueeze(-1)).sum() / count
        squares = ((advantages - mean).masked_fill_(~mask, 0.0).square_() * of_rows.unsqueeze(-1)).sum()
        return cls(count=count, mean=mean, squares=squares)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the union of two disjoint sets of advantages."""
        count = self.count + other.count
        difference = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + difference * (other.count / count),
            squares=self.squares + other.squares + difference.square() * (self.count * other.count / count),
        )

    @classmethod
    def empty(cls, like: Tensor) -> Moments:
        """Return the moments of an empty set, with the dtype and device of `like`."""
        zero = like.new_zeros(())
        return cls(count=zero, mean=zero, squares=zero)

    def all_reduce(self, communicator: Communicator) -> Moments:
        """Return the combined moments of all calls in the step."""
        count, moment = communicator.all_gather(torch.stack([self.count, self.count * self.mean])).sum(0).unbind()
        mean = moment / count.clamp(min=1)
        squares = communicator.all_gather(self.squares + self.count * (self.mean - mean).square()).sum(0)
        return Moments(count=count, mean=mean, squares=squares)

    def whiten(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Compute (A - mean) / sqrt(var + 1e-8) with the unbiased variance var. The result is 0 outside the mask.

        A single advantage is left unchanged.
        """
        if float(self.count) < 2:
            return advantages.masked_fill(~mask, 0.0)
        spread = (self.squares / (self.count - 1) + 1e-8).sqrt()
        return advantages.sub(self.mean).div_(spread).masked_fill_(~mask, 0.0)
