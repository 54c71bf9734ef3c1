"""Colors of the palettes differ with normal sight and with deuteranopia."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from agentrl.telemetry.plots import DARK, LIGHT, LINE_STYLES, line_style, palette_css

# Machado, Oliveira and Fernandes (2009), table 1, deuteranopia (severity 1.0), on linear RGB.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
# sRGB to XYZ (IEC 61966-2-1), white point D65.
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    """Return the CIELAB coordinates (CIE 15) of a color as perceived."""
    encoded = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(sight @ linear, 0, 1) / XYZ.sum(1)
    fx, fy, fz = (v ** (1 / 3) if v > (6 / 29) ** 3 else v / (3 * (6 / 29) ** 2) + 4 / 29 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sight", [np.eye(3), DEUTERANOPIA], ids=["normal", "deuteranopia"])
def test_any_two_colours_differ(palette: tuple[str, ...], sight: np.ndarray) -> None:
    distances = {
        (one, other): float(np.linalg.norm(lab(one, sight) - lab(other, sight)))
        for one, other in combinations(palette, 2)
    }
    assert min(distances.values()) >= 20, min(distances.items(), key=lambda pair: pair[1])


def test_any_two_lines_differ_and_neighbours_in_colour_and_dashes() -> None:
    looks = [line_style(place) for place in range(LINE_STYLES)]
    assert len(set(looks)) == LINE_STYLES
    assert all(one[0] != other[0] and one[1] != other[1] for one, other in pairwise(looks))


def test_the_style_sheet_has_the_same_looks() -> None:
    style = palette_css()
    assert f"--line-2: {LIGHT[1]};" in style
    assert f"--line-10: {DARK[1]};" in style
    assert "--dash-1: none;" in style
    assert "--dash-2: 7.2 3.6;" in style  # 4 and 2 widths of a line of 1.8 pixels
    assert f"--line-{LINE_STYLES + 1}" not in style
