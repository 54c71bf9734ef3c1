"""Arrays as JSON can hold them, and curves with few enough points to draw."""

from __future__ import annotations

import numpy as np

_POINTS = 1_000  # of a curve, at most: every second, third, ... token of a longer one


def finite(values: np.ndarray) -> list[object]:
    """The exact values as JSON can hold them; None for what is not a finite number."""
    listed: list[object] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [value if kept else None for value, kept in zip(listed, np.isfinite(values), strict=True)]
    return listed


def drawn_places(length: int) -> np.ndarray:
    """The places of a curve of ``length`` values that are drawn."""
    return np.arange(0, length, max(1, -(-length // _POINTS)))
