"""Pictures of a study: scores by step and by sampled tokens, with bands over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.lab.study.curves import RunCurve, StudyRecord
from agentrl.lab.study.report import by_variant
from agentrl.lab.study.statistics import over_seeds
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.plots import CYCLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_study(record: StudyRecord, folder: Path) -> list[Path]:
    """Draw ``curves.png`` into ``folder``; nothing if no run has an evaluation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not any(run.scores for run in record.runs):
        return []
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    scores, rewards = figure.subplots(1, 2)
    for place, (variant, runs) in enumerate(by_variant(record).items()):
        color, style = CYCLE[place % len(CYCLE)], "-" if place < len(CYCLE) else "--"
        _band(scores, _score_points(runs), variant, color, style, record.study.resamples)
        _band(rewards, _reward_points(runs), variant, color, style, record.study.resamples)
    _dress(scores, "held-out score", "optimizer step")
    _dress(rewards, "training reward, means of ten steps", "optimizer step")
    scores.legend(fontsize=8, frameon=False)
    path = folder / "curves.png"
    atomic_write(path, lambda out: figure.savefig(out, dpi=140, format="png"))
    return [path]


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
            mean = float(np.mean(run.rewards[start : start + window]))
            points.setdefault(run.steps[start + window - 1], []).append(mean)
    return points


def _band(axes: Axes, points: dict[int, list[float]], label: str, color: str, style: str, resamples: int) -> None:
    if not points:
        return
    steps = sorted(points)
    found = [over_seeds(points[step], resamples=min(resamples, 1000)) for step in steps]
    axes.plot(steps, [item.value for item in found], style, color=color, label=label, linewidth=1.4)
    axes.fill_between(
        steps, [item.low for item in found], [item.high for item in found], color=color, alpha=0.15, linewidth=0
    )


def _dress(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
