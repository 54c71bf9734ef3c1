"""Checks on the numbers in options records: each message names the option and its value.

They take whatever a user may have written: what is no number lies outside every range.
"""

import math
from typing import TypeGuard

from agentrl.algorithms.errors import InvalidOptionError


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
