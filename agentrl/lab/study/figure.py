"""The picture of a study: scores and rewards by step, with bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.lab.study.curves import RunCurve, StudyRecord
from agentrl.lab.study.report import by_variant
from agentrl.lab.study.settings import StudySettings
from agentrl.lab.study.statistics import over_seeds
from agentrl.telemetry.plots import CYCLE, save_twins

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 11.5  # inches
COLUMNS = 4


def draw_study(record: StudyRecord, folder: Path) -> list[Path]:
    """Draw ``curves.png`` into ``folder``; nothing if no run has an evaluation."""
    if not any(run.scores for run in record.runs):
        return []
    figure = study_figure(record)
    path = folder / "curves.png"
    figure.set_dpi(140)
    return save_twins(figure, path)


def study_figure(record: StudyRecord) -> Figure:
    """Few variants share one picture; more than there are colours get one each, with the others in grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = by_variant(record)
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    (_together if len(variants) <= len(CYCLE) else _one_by_one)(figure, variants, record.study)
    seeds = sorted({len(runs) for runs in variants.values()})
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    figure.text(0.99, 0.995, f"{record.study.name}: {count} seeds, bands are 95 % intervals over seeds",
                fontsize=8, ha="right", va="top")  # fmt: skip
    return figure


def _together(figure: Figure, variants: Mapping[str, Sequence[RunCurve]], study: StudySettings) -> None:
    figure.set_size_inches(WIDTH, 4.6)
    scores, rewards = figure.subplots(1, 2)
    for (variant, runs), color in zip(variants.items(), CYCLE, strict=False):
        _band(scores, _score_points(runs), variant, color)
        _band(rewards, _reward_points(runs), variant, color)
    _dress(scores, "held-out score")
    _dress(rewards, "training reward, means of ten steps")
    for axes in (scores, rewards):
        axes.set_xlabel("optimizer step")
    scores.legend(fontsize=8, frameon=False)


def _one_by_one(figure: Figure, variants: Mapping[str, Sequence[RunCurve]], study: StudySettings) -> None:
    rows = math.ceil(len(variants) / COLUMNS)
    figure.set_size_inches(WIDTH, 1.2 + 1.9 * rows)
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    means = {variant: _means(_score_points(runs)) for variant, runs in variants.items()}
    for place, ((variant, runs), axes) in enumerate(zip(variants.items(), panels, strict=False)):
        for steps, values in means.values():
            axes.plot(steps, values, color="0.85", linewidth=0.8)
        axes.plot(*means[study.compared_with], color="0.45", linewidth=1.0)
        _band(axes, _score_points(runs), variant, CYCLE[0])
        _dress(axes, variant, size=8)
        axes.tick_params(labelbottom=place + COLUMNS >= len(variants))
    for axes in panels:  # those left over
        axes.set_axis_off()
    figure.suptitle(
        f"held-out score; grey: the other variants, dark: {study.compared_with}", fontsize=10, x=0.01, ha="left"
    )
    figure.supxlabel("optimizer step", fontsize=10)


def _means(points: Mapping[int, Sequence[float]]) -> tuple[list[int], list[float]]:
    steps = sorted(points)
    return steps, [float(np.mean(points[step])) for step in steps]


def _score_points(runs: Sequence[RunCurve]) -> dict[int, list[float]]:
    points: dict[int, list[float]] = {}
    for run in runs:
        for score in run.scores:
            points.setdefault(score.step, []).append(score.mean)
    return points


def _reward_points(runs: Sequence[RunCurve], window: int = 10) -> dict[int, list[float]]:
    points: dict[int, list[float]] = {}
    for run in runs:
        for start in range(0, len(run.steps) - window + 1, window):
            values = [value for value in run.rewards[start : start + window] if value is not None]
            if values:
                points.setdefault(run.steps[start + window - 1], []).append(float(np.mean(values)))
    return points


def _band(axes: Axes, points: Mapping[int, Sequence[float]], label: str, color: str) -> None:
    if not points:
        return
    steps = sorted(points)
    found = [over_seeds(points[step]) for step in steps]
    axes.plot(steps, [item.value for item in found], color=color, label=label, linewidth=1.4)
    axes.fill_between(
        steps, [item.low for item in found], [item.high for item in found], color=color, alpha=0.15, linewidth=0
    )


def _dress(axes: Axes, title: str, size: int = 10) -> None:
    axes.set_title(title, fontsize=size, loc="left")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
