"""Checks on the numbers in options records: each message names the option and its value."""

import math

from agentrl.algorithms.errors import InvalidOptionError


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise InvalidOptionError unless value is finite and lies in [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        where = f"must be at least {low:g} and finite" if high == math.inf else f"lies outside [{low:g}, {high:g}]"
        raise InvalidOptionError(f"{name}={value} {where}")


def check_positive(name: str, value: float) -> None:
    """Raise InvalidOptionError unless value is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidOptionError(f"{name}={value} must be positive and finite")


def check_fraction(name: str, value: float) -> None:
    """Raise InvalidOptionError unless 0 < value <= 1."""
    if not 0.0 < value <= 1.0:
        raise InvalidOptionError(f"{name}={value} lies outside (0, 1]")


def check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise InvalidOptionError unless low <= high."""
    if not low <= high:
        raise InvalidOptionError(f"{low_name}={low} is above {high_name}={high}")
