"""Line colours of plots and of the viewer, on light and dark backgrounds.

Any two colours of a palette differ by at least 20 in CIELAB, also under simulated deuteranopia
(tests/telemetry/test_palette.py). Dashes or markers also distinguish lines.
"""

from __future__ import annotations

LIGHT = ("#0050ba", "#f2750a", "#081121", "#972879", "#45a2e0", "#559f72", "#765b00", "#4a0300")
DARK = ("#0079ff", "#ed7832", "#ffffba", "#f2a0ff", "#106ea7", "#32d2aa", "#ffe900", "#81653b")
PAPER, INK = ("#ffffff", "#1a1e25"), ("#1c2128", "#e4e8ee")


def palette_css() -> str:
    """Return a style sheet with the palettes as the variables ``--line-1`` to ``--line-8``."""

    def variables(colours: tuple[str, ...]) -> str:
        return " ".join(f"--line-{number}: {colour};" for number, colour in enumerate(colours, start=1))

    light, dark = variables(LIGHT), variables(DARK)
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
