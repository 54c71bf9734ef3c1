"""Checks on options and on tensors; each message names the option and its value, or the tensor and the place.

The checks on options accept whatever a user may have written: a value that is not a number is outside every range.
"""

import math
from dataclasses import fields
from typing import TypeGuard

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError, InvalidOptionError
from agentrl.algorithms.records import AdvantageInputs

_OF_ROLLOUTS = ("groups", "samples", "branches", "parents", "forks")
_PER_TRAJECTORY = (*_OF_ROLLOUTS, "trajectory_energy", "bootstrap_values", "greedy_returns")
_NOT_FLOATING = (*_OF_ROLLOUTS, "response_mask", "loss_mask")


def check_shapes(inputs: AdvantageInputs) -> None:
    """Raise InvalidInputError unless shapes and dtypes are those of the record."""
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
    message = (
        "{name} holds {value} in row {row} at position {position}, which is no model token: a reward stands on the "
        "last model token of its turn"
    )
    _refuse(torch.isfinite(off) & (off != 0), message, "rewards", rewards, rows)


def as_mask(name: str, mask: Tensor) -> Tensor:
    """The mask as bool; integer and floating masks of zeros and ones are accepted."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInputError(f"{name} must be bool or hold only 0 and 1; got {mask.dtype} with other values")
    return mask.bool()


def check_alike(**tensors: Tensor | None) -> None:
    """Raise InvalidInputError unless the first tensor is [B, T] and all others that are given have its shape."""
    (first, leader), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    if leader.ndim != 2:
        raise InvalidInputError(f"{first} must be [B, T]; got {tuple(leader.shape)}")
    for name, tensor in others:
        if tensor.shape != leader.shape:
            raise InvalidInputError(
                f"{name} must be [B, T] as {first}; got {tuple(tensor.shape)} and {tuple(leader.shape)}"
            )


def as_loss_mask(loss_mask: Tensor | None, response_mask: Tensor) -> Tensor:
    """The loss mask as bool, by default the response mask; InvalidInputError if it holds a token that is not there."""
    if loss_mask is None:
        return response_mask
    check_alike(response_mask=response_mask, loss_mask=loss_mask)
    mask = as_mask("loss_mask", loss_mask)
    if bool((mask & ~response_mask).any()):
        raise InvalidInputError("loss_mask holds tokens that response_mask does not")
    return mask


def check_finite(name: str, tensor: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Raise InvalidInputError at the first NaN or infinity where the mask is True.

    `rows` are the numbers by which the message names the rows, if they are not 0, 1, ...
    """
    _refuse(
        mask & ~torch.isfinite(tensor),
        "{name} is {value} at a model token: row {row}, position {position}",
        name,
        tensor,
        rows,
    )


def check_not_negative(name: str, tensor: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Raise InvalidInputError at the first negative value where the mask is True; `rows` as in `check_finite`."""
    _refuse(
        mask & (tensor < 0),
        "{name} is {value} in row {row} at position {position}; it cannot be negative",
        name,
        tensor,
        rows,
    )


def _refuse(bad: Tensor, message: str, name: str, tensor: Tensor, rows: Tensor | None) -> None:
    if bool(bad.any()):
        row, position = bad.nonzero()[0].tolist()
        value = float(tensor[row, position].detach())
        place = row if rows is None else int(rows[row])
        raise InvalidInputError(message.format(name=name, value=value, row=place, position=position))


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_range(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise InvalidOptionError unless value is finite and lies in [low, high]."""
    if not (is_number(value) and math.isfinite(value) and low <= value <= high):
        where = f"must be at least {low:g} and finite" if high == math.inf else f"lies outside [{low:g}, {high:g}]"
        raise InvalidOptionError(f"{name}={value!r} {where}")


def check_positive(name: str, value: object) -> None:
    """Raise InvalidOptionError unless value is positive and finite."""
    if not (is_number(value) and math.isfinite(value) and value > 0):
        raise InvalidOptionError(f"{name}={value!r} must be positive and finite")


def check_fraction(name: str, value: object) -> None:
    """Raise InvalidOptionError unless 0 < value <= 1."""
    if not (is_number(value) and 0.0 < value <= 1.0):
        raise InvalidOptionError(f"{name}={value!r} lies outside (0, 1]")


def check_order(low_name: str, low: object, high_name: str, high: object) -> None:
    """Raise InvalidOptionError unless both are numbers and low <= high."""
    for name, value in ((low_name, low), (high_name, high)):
        if not is_number(value):
            raise InvalidOptionError(f"{name}={value!r} must be a number")
    if not low <= high:  # type: ignore[operator]
        raise InvalidOptionError(f"{low_name}={low} is above {high_name}={high}")


def check_flag(name: str, value: object) -> None:
    """Raise InvalidOptionError unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name}={value!r} must be True or False")
