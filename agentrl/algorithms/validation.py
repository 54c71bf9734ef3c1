"""Checks on the tensors of AdvantageInputs: each message names the tensor and, where there is one, the place."""

from dataclasses import fields

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError
from agentrl.algorithms.records import AdvantageInputs

_PER_TRAJECTORY = ("groups", "trajectory_energy", "bootstrap_values", "greedy_returns")
_NOT_FLOATING = ("response_mask", "loss_mask", "groups")


def check_shapes(inputs: AdvantageInputs) -> None:
    """Raise InvalidInputError unless shapes and dtypes are what the record promises."""
    if inputs.rewards.ndim != 2:
        raise InvalidInputError(f"rewards must be [B, T]; got {tuple(inputs.rewards.shape)}")
    shape = inputs.rewards.shape
    for field in fields(inputs):
        tensor = getattr(inputs, field.name)
        if tensor is None:
            continue
        expected = shape[:1] if field.name in _PER_TRAJECTORY else shape
        if tensor.shape != expected:
            raise InvalidInputError(f"{field.name} must be {tuple(expected)} as rewards; got {tuple(tensor.shape)}")
        if field.name not in _NOT_FLOATING and not tensor.is_floating_point():
            raise InvalidInputError(f"{field.name} must be floating; got {tensor.dtype}")
    if inputs.groups.dtype not in (torch.int64, torch.int32):
        raise InvalidInputError(f"groups must be int64; got {inputs.groups.dtype}")


def check_rows(mask: Tensor, rows: Tensor) -> None:
    """Raise InvalidInputError at the first row of mask [b, T] without a model token."""
    empty = ~mask.any(-1)
    if bool(empty.any()):
        row = int(rows[empty.nonzero()[0]])
        raise InvalidInputError(f"row {row} has no model token: such a trajectory is a bug where it was made")


def check_rewards_placed(rewards: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Raise InvalidInputError at the first finite reward off the mask [b, T]."""
    off = rewards.masked_fill(mask, 0)
    if float(off.abs().sum()) == 0.0:
        return
    misplaced = torch.isfinite(off) & (off != 0)
    if bool(misplaced.any()):
        row, position = _first(misplaced)
        raise InvalidInputError(
            f"rewards holds {float(rewards[row, position])} in row {int(rows[row])} at position {position}, which is "
            "no model token: a reward stands on the last model token of its turn"
        )


def as_mask(name: str, mask: Tensor) -> Tensor:
    """The mask as bool; integer and floating masks of zeros and ones are accepted."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInputError(f"{name} must be bool or hold only 0 and 1; got {mask.dtype} with other values")
    return mask.bool()


def check_finite(name: str, tensor: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Raise InvalidInputError at the first NaN or infinity where the mask is True.

    `rows` are the numbers by which the message names the rows, if they are not 0, 1, ...
    """
    bad = mask & ~torch.isfinite(tensor)
    if bool(bad.any()):
        row, position = _first(bad)
        raise InvalidInputError(
            f"{name} is {float(tensor[row, position])} at a model token: row {_name(row, rows)}, position {position}"
        )


def check_not_negative(name: str, tensor: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Raise InvalidInputError at the first negative value where the mask is True; `rows` as in `check_finite`."""
    bad = mask & (tensor < 0)
    if bool(bad.any()):
        row, position = _first(bad)
        raise InvalidInputError(
            f"{name} is {float(tensor[row, position])} in row {_name(row, rows)} at position {position}; it cannot be "
            "negative"
        )


def _name(row: int, rows: Tensor | None) -> int:
    return row if rows is None else int(rows[row])


def _first(where: Tensor) -> tuple[int, int]:
    row, position = where.nonzero()[0].tolist()
    return row, position
