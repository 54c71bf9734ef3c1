"""Figure of a study: scores and rewards by step, with bands over seeds."""

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
from agentrl.telemetry.palette import LIGHT
from agentrl.telemetry.plots import caption, dress, legend_below, look, new_figure, save_twins

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 11.5  # inches
COLUMNS = 4


def draw_study(record: StudyRecord, folder: Path) -> list[Path]:
    """Draw ``curves.png`` into ``folder``. Draws nothing if no run has an evaluation."""
    if not any(run.scores for run in record.runs):
        return []
    return save_twins(study_figure(record), folder / "curves.png")


def study_figure(record: StudyRecord) -> Figure:
    """Draw the variants in one panel, or in a panel each with the others in grey if there are more than colours."""
    variants = by_variant(record)
    seeds = sorted({len(runs) for runs in variants.values()})
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    text = f"{record.study.name}: {count} seeds, bands are 95 % intervals over seeds"
    return (_together if len(variants) <= len(LIGHT) else _one_by_one)(variants, record.study, text)


def _together(variants: Mapping[str, Sequence[RunCurve]], study: StudySettings, text: str) -> Figure:
    figure = new_figure(WIDTH, 4.8)
    scores, rewards = figure.subplots(1, 2)
    for index, (variant, runs) in enumerate(variants.items()):
        _band(scores, _score_points(runs), variant, index)
        _band(rewards, _reward_points(runs), variant, index)
    for axes, title in ((scores, "Held-out score"), (rewards, "Training reward, means of ten steps")):
        dress(axes, title)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step")
    legend_below(scores, columns=4)
    caption(figure, text)
    return figure


def _one_by_one(variants: Mapping[str, Sequence[RunCurve]], study: StudySettings, text: str) -> Figure:
    rows = math.ceil(len(variants) / COLUMNS)
    figure = new_figure(WIDTH, 1.2 + 1.9 * rows)
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    means = {variant: _means(_score_points(runs)) for variant, runs in variants.items()}
    for index, ((variant, runs), axes) in enumerate(zip(variants.items(), panels, strict=False)):
        for steps, values in means.values():
            axes.plot(steps, values, color="0.85", linewidth=0.8)
        axes.plot(*means[study.compared_with], color="0.45", linestyle="--", linewidth=1.0)
        _band(axes, _score_points(runs), variant, 0)
        dress(axes, variant)
        axes.set_title(variant, loc="left", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelbottom=index + COLUMNS >= len(variants))
    for axes in panels:  # the rest of the iterator: panels without a variant
        axes.set_axis_off()
    caption(figure, f"{text}\nHeld-out score; grey: the other variants, dashed: {study.compared_with}")
    figure.supxlabel("optimizer step", fontsize=10)
    return figure


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


def _band(axes: Axes, points: Mapping[int, Sequence[float]], label: str, index: int) -> None:
    if not points:
        return
    steps = sorted(points)
    estimates = [over_seeds(points[step]) for step in steps]
    axes.plot(steps, [item.value for item in estimates], **look(index), label=label, linewidth=1.6)
    axes.fill_between(
        steps,
        [item.low for item in estimates],
        [item.high for item in estimates],
        color=look(index)["color"],
        alpha=0.15,
        linewidth=0,
    )
