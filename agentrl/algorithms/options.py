"""Names, options and checks shared by all algorithms, and their exceptions.

    AlgorithmError (a ValueError)
    ├── InvalidOptionError   an option's value is outside its range
    ├── MissingInputError    a tensor that the chosen options need is missing
    └── InvalidInputError    a tensor has a wrong shape, dtype or value

InvalidOptionError and UnknownNameError of `agentrl_envs.registry` are mistakes in the user's settings. The others are
bugs in the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor

from agentrl_envs.registry import Registry, did_you_mean
from agentrl_envs.registry import UnknownNameError as UnknownNameError


class AlgorithmError(ValueError):
    """Base class of this package's exceptions."""


class InvalidOptionError(AlgorithmError):
    """A known option has a value outside its range."""


class MissingInputError(AlgorithmError):
    """An optional tensor that the chosen options need is missing."""


class InvalidInputError(AlgorithmError):
    """A tensor has a wrong shape, dtype or value."""


def check_choice(option: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise InvalidOptionError unless `value` is one of `choices`. The message suggests the nearest choice."""
    known = list(choices)
    if value in known:
        return
    hint = did_you_mean(str(value), [choice for choice in known if choice is not None])
    raise InvalidOptionError(f"{option}={value!r} is not one of {', '.join(map(str, known))}{hint}")


T = TypeVar("T")
R = TypeVar("R", bound="Options")
F = TypeVar("F", bound=Callable[..., Any])


def checked_option(default: T, check: Callable[..., None], *limits: object) -> T:
    """Define a field of `Options` that is validated by ``check(name, value, *limits)``, such as `check_range`."""
    return field(default=default, metadata={"check": check, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of option records, which define the defaults. Raises InvalidOptionError for an invalid value."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.metadata:
                item.metadata["check"](item.name, getattr(self, item.name), *item.metadata["limits"])


@dataclass(frozen=True)
class NoOptions:
    """Options of functions without options."""


def make_options(kind: type[R], owner: str, given: Mapping[str, object]) -> R:
    """Create an options record from keyword arguments. Raises UnknownNameError for an option unknown to ``owner``."""
    known = [item.name for item in fields(kind)]
    for name in given:
        if name not in known:
            raise UnknownNameError("option", name, known, owner=owner)
    return kind(**given)


@dataclass(frozen=True)
class RegistryEntry(Generic[F]):
    """A registered function and the frozen dataclass of its options."""

    function: F
    options: type

    def make_options(self, owner: str, given: Mapping[str, object]) -> Any:
        """Create the entry's options record, as :func:`make_options`."""
        return make_options(self.options, owner, given)


E = TypeVar("E", bound=RegistryEntry[Any])


class OptionsRegistry(Registry[E]):
    """Registry of entries with options, by name."""

    def option_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the entry's options."""
        return tuple(item.name for item in fields(self[name].options))


def to_bool_mask(name: str, mask: Tensor) -> Tensor:
    """Convert a mask to bool. Integer and floating-point masks of zeros and ones are accepted."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInputError(f"{name} must be bool or contain only 0 and 1; got {mask.dtype} with other values")
    return mask.bool()


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise InvalidInputError unless the first tensor is [B, T] and all other tensors have its shape or are None."""
    (first, leader), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    if leader.ndim != 2:
        raise InvalidInputError(f"{first} must be [B, T]; got {tuple(leader.shape)}")
    for name, tensor in others:
        if tensor.shape != leader.shape:
            raise InvalidInputError(
                f"{name} must be [B, T] like {first}; got {tuple(tensor.shape)} and {tuple(leader.shape)}"
            )


def loss_mask_or_response_mask(loss_mask: Tensor | None, response_mask: Tensor) -> Tensor:
    """Return the loss mask as bool, by default the response mask.

    Raises InvalidInputError if the loss mask is True where the response mask is False.
    """
    if loss_mask is None:
        return response_mask
    check_same_shape(response_mask=response_mask, loss_mask=loss_mask)
    mask = to_bool_mask("loss_mask", loss_mask)
    if bool((mask & ~response_mask).any()):
        raise InvalidInputError("loss_mask is True at tokens where response_mask is False")
    return mask


def check_finite(name: str, tensor: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Raise InvalidInputError at the first NaN or infinity where the mask is True.

    `rows` are the row indices for the message, by default 0, 1, ...
    """
    raise_at_first_invalid(
        mask & ~torch.isfinite(tensor),
        "{name} is {value} at a model token: row {row}, position {position}",
        name,
        tensor,
        rows,
    )


def check_not_negative(name: str, tensor: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Raise InvalidInputError at the first negative value where the mask is True; `rows` as in `check_finite`."""
    raise_at_first_invalid(
        mask & (tensor < 0),
        "{name} is {value} in row {row} at position {position}; it must not be negative",
        name,
        tensor,
        rows,
    )


def raise_at_first_invalid(bad: Tensor, message: str, name: str, tensor: Tensor, rows: Tensor | None) -> None:
    """Raise InvalidInputError for the first True in ``bad``. Message fields: {name}, {value}, {row}, {position}."""
    if bool(bad.any()):
        row, position = bad.nonzero()[0].tolist()
        value = float(tensor[row, position].detach())
        place = row if rows is None else int(rows[row])
        raise InvalidInputError(message.format(name=name, value=value, row=place, position=position))


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a number other than a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_range(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise InvalidOptionError unless value is finite and lies in [low, high]."""
    if not (is_number(value) and math.isfinite(value) and low <= value <= high):
        where = f"must be at least {low:g} and finite" if high == math.inf else f"must be in [{low:g}, {high:g}]"
        raise InvalidOptionError(f"{name}={value!r} {where}")


def check_positive(name: str, value: object) -> None:
    """Raise InvalidOptionError unless value is positive and finite."""
    if not (is_number(value) and math.isfinite(value) and value > 0):
        raise InvalidOptionError(f"{name}={value!r} must be positive and finite")


def check_in_unit_interval(name: str, value: object) -> None:
    """Raise InvalidOptionError unless 0 < value <= 1."""
    if not (is_number(value) and 0.0 < value <= 1.0):
        raise InvalidOptionError(f"{name}={value!r} must be in (0, 1]")


def check_order(low_name: str, low: object, high_name: str, high: object) -> None:
    """Raise InvalidOptionError unless low and high are numbers with low <= high."""
    for name, value in ((low_name, low), (high_name, high)):
        if not is_number(value):
            raise InvalidOptionError(f"{name}={value!r} must be a number")
    if not low <= high:  # type: ignore[operator]
        raise InvalidOptionError(f"{low_name}={low} is above {high_name}={high}")


def check_bool(name: str, value: object) -> None:
    """Raise InvalidOptionError unless value is True or False."""
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name}={value!r} must be True or False")
