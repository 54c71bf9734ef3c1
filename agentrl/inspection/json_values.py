"""Values as JSON can hold them, and curves with few enough points to draw."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

_POINTS = 1_000  # of a curve, at most: every second, third, ... token of a longer one


def to_json(value: object) -> str:
    """Return strict JSON for browsers, with the strings "NaN", "Infinity" and "-Infinity" for non-finite numbers.

    Escapes all characters outside ASCII, because strings may contain lone surrogates, which UTF-8 cannot encode.
    Dates and other values that JSON does not have are written as strings.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        return json.dumps(_spelled(value), separators=(",", ":"), default=str)


def _spelled(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelled(inner) for key, inner in value.items()}
    return [_spelled(inner) for inner in value] if isinstance(value, list | tuple) else value


def finite(values: np.ndarray) -> list[object]:
    """The exact values as JSON can hold them; None for what is not a finite number."""
    listed: list[object] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [value if kept else None for value, kept in zip(listed, np.isfinite(values), strict=True)]
    return listed


def drawn_places(length: int) -> np.ndarray:
    """The places of a curve of ``length`` values that are drawn."""
    return np.arange(0, length, max(1, -(-length // _POINTS)))
