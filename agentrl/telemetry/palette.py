"""Colours and dashes of lines in plots, the viewer and reports, on light and dark backgrounds.

Any two colours of a palette differ by at least 20 in CIELAB, also under simulated deuteranopia
(tests/telemetry/test_palette.py). Dashes distinguish lines in addition.
"""

from __future__ import annotations

LIGHT = ("#0050ba", "#f2750a", "#081121", "#972879", "#45a2e0", "#559f72", "#765b00", "#4a0300")
DARK = ("#0079ff", "#ed7832", "#ffffba", "#f2a0ff", "#106ea7", "#32d2aa", "#ffe900", "#81653b")
PAPER, INK = ("#ffffff", "#1a1e25"), ("#1c2128", "#e4e8ee")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1, 1.5), (6, 2, 1, 2))  # dashes and gaps in units of line width
LOOKS = 16  # lines that can be distinguished
_LINE_WIDTH = 1.8  # pixels of the viewer's lines


def line_look(index: int) -> tuple[int, tuple[float, ...]]:
    """Return the index into a palette and the dashes of the n-th line (from 0). Neighbours differ in both.

    >>> [line_look(place) for place in (0, 1, 8, 17)]
    [(0, ()), (1, (4, 2)), (0, (4, 2)), (1, (6, 2, 1, 2))]
    """
    return index % len(LIGHT), DASHES[(index + index // len(LIGHT)) % len(DASHES)]


def palette_css() -> str:
    """Return a style sheet with colours and dashes, ``--line-1`` to ``--line-16`` and ``--dash-1`` to ``--dash-16``."""

    def dashes(index: int) -> str:
        return " ".join(f"{length * _LINE_WIDTH:g}" for length in line_look(index)[1]) or "none"

    def colours(palette: tuple[str, ...]) -> str:
        return " ".join(f"--line-{index + 1}: {palette[line_look(index)[0]]};" for index in range(LOOKS))

    strokes = " ".join(f"--dash-{index + 1}: {dashes(index)};" for index in range(LOOKS))
    return (
        f":root {{ {colours(LIGHT)} {strokes} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {colours(DARK)} }} }}\n"
    )
