"""Checks on the tensors of AdvantageInputs: each message names the tensor and, where there is one, the place."""

from dataclasses import fields

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError
from agentrl.algorithms.records import AdvantageInputs

_PER_TRAJECTORY = ("groups", "trajectory_energy", "greedy_returns")


def check_advantage_inputs(inputs: AdvantageInputs) -> None:
    """Raise InvalidInputError unless shapes, dtypes, the mask and the rewards are what the record promises."""
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
        if field.name not in ("response_mask", "groups") and not tensor.is_floating_point():
            raise InvalidInputError(f"{field.name} must be floating; got {tensor.dtype}")
    if inputs.groups.dtype not in (torch.int64, torch.int32):
        raise InvalidInputError(f"groups must be int64; got {inputs.groups.dtype}")
    mask = as_mask("response_mask", inputs.response_mask)
    _check_rows(mask)
    check_finite("rewards", inputs.rewards, mask)
    misplaced = ~mask & torch.isfinite(inputs.rewards) & (inputs.rewards != 0)
    if bool(misplaced.any()):
        row, position = _first(misplaced)
        raise InvalidInputError(
            f"rewards holds {float(inputs.rewards[row, position])} in row {row} at position {position}, which is no "
            "model token: a reward stands on the last model token of its turn"
        )


def as_mask(name: str, mask: Tensor) -> Tensor:
    """The mask as bool; integer and floating masks of zeros and ones are accepted."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInputError(f"{name} must be bool or hold only 0 and 1; got {mask.dtype} with other values")
    return mask.bool()


def check_finite(name: str, tensor: Tensor, mask: Tensor) -> None:
    """Raise InvalidInputError at the first NaN or infinity where the mask is True."""
    bad = mask & ~torch.isfinite(tensor)
    if bool(bad.any()):
        row, position = _first(bad)
        raise InvalidInputError(
            f"{name} is {float(tensor[row, position])} at a model token: row {row}, position {position}"
        )


def check_not_negative(name: str, tensor: Tensor, mask: Tensor) -> None:
    """Raise InvalidInputError at the first negative value where the mask is True."""
    bad = mask & (tensor < 0)
    if bool(bad.any()):
        row, position = _first(bad)
        raise InvalidInputError(
            f"{name} is {float(tensor[row, position])} in row {row} at position {position}; it cannot be negative"
        )


def _check_rows(mask: Tensor) -> None:
    empty = ~mask.any(-1)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise InvalidInputError(f"row {row} has no model token: such a trajectory is a bug where it was made")


def _first(where: Tensor) -> tuple[int, int]:
    row, position = where.nonzero()[0].tolist()
    return row, position
