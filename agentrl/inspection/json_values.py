"""Conversion of values to strict JSON, and thinning of curves for drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

_POINTS = 1_000  # maximum number of points of a curve; of a longer one every second, third, ... token is drawn


def to_json(value: object) -> str:
    """Return strict JSON for browsers, with the strings "NaN", "Infinity" and "-Infinity" for non-finite numbers.

    Escapes all characters outside ASCII, because strings may contain lone surrogates, which UTF-8 cannot encode.
    Dates and other values that JSON does not have are written as strings.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        return json.dumps(_without_non_finite(value), separators=(",", ":"), default=str)


def _without_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner) for key, inner in value.items()}
    return [_without_non_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def finite(values: np.ndarray) -> list[object]:
    """Return exact values for JSON, with None in place of numbers that are not finite."""
    listed: list[object] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [value if kept else None for value, kept in zip(listed, np.isfinite(values), strict=True)]
    return listed


def drawn_indices(length: int) -> np.ndarray:
    """Return the indices at which a curve of ``length`` values is drawn."""
    return np.arange(0, length, max(1, -(-length // _POINTS)))
