"""Which trajectories count: in their group's statistics, and in the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError, InvalidOptionError, check_choice
from agentrl.algorithms.segments import group_mean, relabel, segment_min, segment_sum

VOID_TURN_MODES = ("remove", "loss_only", "keep")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """`in_groups` [B]: counts in means, baselines, stds; `in_loss` [B]: counts in the loss, and so in its group."""

    in_groups: Tensor
    in_loss: Tensor


def select_trajectories(*, void_turn: Tensor, no_data: Tensor, void_turns: str) -> Selection:
    """What trajectories [B] take part, from two boolean flags.

    `no_data` (infrastructure failures, cancelled, a grader that ran out of time) is in nothing. A trajectory with a
    void turn (neither code nor an answer) is in nothing (`remove`, as the SimpleTIR paper has it), in its group's
    statistics but not in the loss (`loss_only`, as its code has it), or in both (`keep`).
    """
    check_choice("void_turns", void_turns, VOID_TURN_MODES)
    if void_turn.dtype != torch.bool or no_data.dtype != torch.bool or void_turn.shape != no_data.shape:
        raise InvalidInputError("void_turn and no_data must be boolean and of one shape [B]")
    data = ~no_data
    return Selection(
        in_groups=data & ~void_turn if void_turns == "remove" else data,
        in_loss=data if void_turns == "keep" else data & ~void_turn,
    )


def mixed_groups(returns: Tensor, groups: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """[B] True in groups whose returns [B] differ by more than `tolerance`; all others give no gradient.

    A group of one is not mixed.
    """
    _check_rows(returns, groups)
    labels, count = relabel(groups)
    lowest = segment_min(returns, labels, count)
    highest = -segment_min(-returns, labels, count)
    return (highest - lowest > tolerance)[labels]


def groups_within(scores: Tensor, groups: Tensor, *, low: float, high: float) -> Tensor:
    """[B] True in groups whose mean score [B] lies in [low, high] (SimpleTIR: accuracy within [0.1, 0.9])."""
    _check_rows(scores, groups)
    if not low <= high:
        raise InvalidOptionError(f"low={low} is greater than high={high}")
    labels, count = relabel(groups)
    means = group_mean(scores.double(), labels, count)
    return ((means >= low) & (means <= high))[labels]


def group_sizes(groups: Tensor) -> Tensor:
    """[B] the number of trajectories in the row's group."""
    labels, count = relabel(groups)
    return segment_sum(torch.ones_like(labels), labels, count)[labels]


def _check_rows(values: Tensor, groups: Tensor) -> None:
    if values.ndim != 1 or values.shape != groups.shape:
        raise InvalidInputError(f"values and groups must both be [B]; got {tuple(values.shape)}, {tuple(groups.shape)}")
    if not bool(torch.isfinite(values).all()):
        raise InvalidInputError(f"row {int((~torch.isfinite(values)).nonzero()[0])} is not finite")
