"""Report of a study: tables in Markdown, and a figure of scores and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from agentrl.lab.study.settings import StudySettings
from agentrl.lab.study.statistics import (
    MeanWithInterval,
    RunCurve,
    StudyRecord,
    interquartile_mean,
    mean_over_seeds,
    paired_differences,
)
from agentrl.telemetry.plots import (
    LIGHT,
    add_caption,
    add_legend_below,
    line_plot_options,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def study_markdown(record: StudyRecord) -> str:
    """Render the report as Markdown: scores, costs, collapses, paired differences and unfinished runs."""
    study = record.study
    lines = [f"# {study.name}", "", _describe_study(record), "", *_score_table(record)]
    if study.target is not None:
        lines += ["", *_cost_table(record, study.target)]
    lines += ["", *_difference_table(record, "Final score", lambda run: run.final_score)]
    lines += ["", *_difference_table(record, "Area", lambda run: run.mean_score_over_steps)]
    if study.tokens is not None:
        lines += ["", *_equal_tokens_table(record, study.tokens)]
    left = [run for run in record.runs if run.status != "finished"]
    if left:
        lines += ["", "## Not finished", "", "| run | seed | status | reason |", "|---|---|---|---|"]
        lines += [f"| {run.variant} | {run.seed} | {run.status} | {_table_cell(run.message)} |" for run in left]
    return "\n".join(lines) + "\n"


def curves_by_variant(record: StudyRecord) -> dict[str, list[RunCurve]]:
    """Return the runs of each variant, in the order of the study."""
    return {name: [run for run in record.runs if run.variant == name] for name in record.study.all_variants()}


def _describe_study(record: StudyRecord) -> str:
    study = record.study
    shared = ", ".join(f"`{key}={value}`" for key, value in study.settings.items())
    done = sum(run.status == "finished" for run in record.runs)
    return (
        f"{done} of {len(record.runs)} runs finished, seeds {', '.join(map(str, study.seeds))}, agentrl "
        f"{record.agentrl}. Every run: `agentrl train --env {study.env}"
        + (f" --config {study.config}`" if study.config else "`")
        + (f" with {shared}." if shared else ".")
    )


def _score_table(record: StudyRecord) -> list[str]:
    lines = [
        "## Scores",
        "",
        "Held-out score after training, and its mean over all steps (area). Brackets are 95 % intervals over seeds: "
        "Student's t for means, Tukey and McLaughlin's for the interquartile mean.",
        "",
        "| variant | seeds | at the start | final | final, interquartile mean | area | collapsed | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in curves_by_variant(record).items():
        done = [run for run in runs if run.status == "finished"]
        failed = sum(run.status == "failed" for run in runs)
        starts = [run.scores[0].mean for run in runs if run.final_score is not None]
        finals = [run.final_score for run in runs if run.final_score is not None]
        areas = [run.mean_score_over_steps for run in runs if run.mean_score_over_steps is not None]
        collapsed = sum(run.has_collapsed(record.study.collapse) for run in done)
        cells = [
            variant,
            str(len(finals)),
            _format_estimate(starts, mean_over_seeds),
            _format_estimate(finals, mean_over_seeds),
            _format_estimate(finals, interquartile_mean),
            _format_estimate(areas, mean_over_seeds),
            f"{collapsed} of {len(done)}",
            str(failed),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cost_table(record: StudyRecord, target: float) -> list[str]:
    lines = [
        f"## Cost of a held-out score of {target:g}",
        "",
        "Median over the runs that reached this score, up to the first evaluation that did. Seconds: of training "
        "steps.",
        "",
        "| variant | reached | sampled tokens | trajectories | seconds |",
        "|---|---|---|---|---|",
    ]
    for variant, runs in curves_by_variant(record).items():
        done = [run for run in runs if run.status == "finished"]
        tokens = [run.cost_to_reach(target, run.model_tokens) for run in done]
        trajectories = [run.cost_to_reach(target, run.trajectories) for run in done]
        seconds = [run.cost_to_reach(target, run.seconds) for run in done]
        reached = f"{sum(value is not None for value in tokens)} of {len(done)}"
        lines.append(f"| {variant} | {reached} | {_median(tokens)} | {_median(trajectories)} | {_median(seconds)} |")
    return lines


def _equal_tokens_table(record: StudyRecord, tokens: int) -> list[str]:
    lines = [
        f"## After {tokens:,} sampled tokens",
        "",
        "Scores between evaluations are interpolated. Area: mean score over the sampled tokens.",
        "",
        "| variant | seeds | score | area | tokens of the whole run, median |",
        "|---|---|---|---|---|",
    ]
    for variant, runs in curves_by_variant(record).items():
        points = [point for run in runs if (point := run.last_and_mean_score_until(tokens)) is not None]
        scores, areas = ([point[index] for point in points] for index in (0, 1))
        totals = [sum(run.model_tokens) for run in runs if run.status == "finished"]
        cells = [_format_estimate(scores, mean_over_seeds), _format_estimate(areas, mean_over_seeds), _median(totals)]
        lines.append(f"| {variant} | {len(points)} | {' | '.join(cells)} |")
    for index, what in enumerate(("Score", "Area")):
        lines += ["", *_difference_table(record, f"{what} after {tokens:,} tokens", _score_at_tokens(tokens, index))]
    return lines


def _score_at_tokens(tokens: int, index: int) -> Callable[[RunCurve], float | None]:
    return lambda run: None if (point := run.last_and_mean_score_until(tokens)) is None else point[index]


def _difference_table(record: StudyRecord, what: str, of: Callable[[RunCurve], float | None]) -> list[str]:
    values = {
        variant: {run.seed: value for run in runs if (value := of(run)) is not None}
        for variant, runs in curves_by_variant(record).items()
    }
    differences = paired_differences(values, record.study.baseline_variant)
    lines = [
        f"## {what}: difference from {record.study.baseline_variant}, paired by seed",
        "",
        "Intervals: 95 %, Student's t. p: sign-flip test, exact up to 20 seeds; adjusted by Holm's method over the "
        "rows of this table.",
        "",
        "| variant | seeds | difference | p | adjusted p |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {item.variant} | {item.difference.seeds} | {item.difference.value:+.3f} "
        f"[{item.difference.low:+.3f}, {item.difference.high:+.3f}] | {item.p_value:.3f} "
        f"| {item.adjusted_p:.3f} |"
        for item in differences
    ]
    return lines if differences else [*lines[:2], "No variant has two finished seeds in common with the baseline."]


def _format_estimate(values: Sequence[float], summary: Callable[..., MeanWithInterval]) -> str:
    if not values:
        return "-"
    estimate = summary(values)
    ends = "" if math.isnan(estimate.low) else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{ends}"


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):,.0f}" if known else "-"


def _table_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


WIDTH = 11.5  # inches
COLUMNS = 4
_WINDOW = 10  # number of steps over which rewards are averaged


def draw_study(record: StudyRecord, folder: Path) -> list[Path]:
    """Draw ``curves.png`` into ``folder`` if any run has an evaluation. Returns the files."""
    if not any(run.scores for run in record.runs):
        return []
    return [save_figure(study_figure(record), folder / "curves.png")]


def study_figure(record: StudyRecord) -> Figure:
    """Draw all variants in one panel, or in one panel per variant if there are more variants than colours."""
    variants = curves_by_variant(record)
    seeds = sorted({len(runs) for runs in variants.values()})
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    text = f"{record.study.name}: {count} seeds, bands are 95 % intervals over seeds"
    return (_plot_in_one_panel if len(variants) <= len(LIGHT) else _plot_in_panels)(variants, record.study, text)


def _plot_in_one_panel(variants: Mapping[str, Sequence[RunCurve]], study: StudySettings, text: str) -> Figure:
    figure = new_figure(WIDTH, 4.8)
    scores, rewards = figure.subplots(1, 2)
    longest = max((len(run.steps) for runs in variants.values() for run in runs), default=0)
    window = _WINDOW if longest >= 2 * _WINDOW else 1  # a line through a single mean would be invisible
    reward_title = "Training reward, means of ten steps" if window == _WINDOW else "Training reward"
    for index, (variant, runs) in enumerate(variants.items()):
        _plot_band(scores, _scores_by_step_or_tokens(runs, study.tokens), variant, index)
        _plot_band(rewards, _rewards_by_step(runs, window), variant, index)
    for axes, title in ((scores, "Held-out score"), (rewards, reward_title)):
        style_axes(axes, title)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step")
    if study.tokens is not None:
        scores.set_xlabel("sampled tokens")
    add_legend_below(scores, columns=4)
    add_caption(figure, text)
    return figure


def _plot_in_panels(variants: Mapping[str, Sequence[RunCurve]], study: StudySettings, text: str) -> Figure:
    rows = math.ceil(len(variants) / COLUMNS)
    figure = new_figure(WIDTH, 1.2 + 1.9 * rows)
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    means = {variant: _steps_and_means(_scores_by_step_or_tokens(runs)) for variant, runs in variants.items()}
    for index, ((variant, runs), axes) in enumerate(zip(variants.items(), panels, strict=False)):
        for steps, values in means.values():
            axes.plot(steps, values, color="0.85", linewidth=0.8)
        axes.plot(*means[study.baseline_variant], color="0.45", linestyle="--", linewidth=1.0)
        _plot_band(axes, _scores_by_step_or_tokens(runs), variant, 0)
        style_axes(axes, variant)
        axes.set_title(variant, loc="left", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelbottom=index + COLUMNS >= len(variants))
    for axes in panels:  # the remaining panels of the iterator have no variant
        axes.set_axis_off()
    add_caption(figure, f"{text}\nHeld-out score; grey: the other variants, dashed: {study.baseline_variant}")
    figure.supxlabel("optimizer step", fontsize=10)
    return figure


def _steps_and_means(points: Mapping[int, Sequence[float]]) -> tuple[list[int], list[float]]:
    steps = sorted(points)
    return steps, [float(np.mean(points[step])) for step in steps]


def _scores_by_step_or_tokens(runs: Sequence[RunCurve], tokens: int | None = None) -> dict[int, list[float]]:
    """Return the scores of all runs by step or, with ``tokens``, at nine token counts up to ``tokens``."""
    points: dict[int, list[float]] = {}
    for run in runs:
        if tokens is not None:
            for place in map(int, np.linspace(1, tokens, 9)):
                if (point := run.last_and_mean_score_until(place)) is not None:
                    points.setdefault(place, []).append(point[0])
            continue
        for score in run.scores:
            points.setdefault(score.step, []).append(score.mean)
    return points


def _rewards_by_step(runs: Sequence[RunCurve], window: int) -> dict[int, list[float]]:
    points: dict[int, list[float]] = {}
    for run in runs:
        for start in range(0, len(run.steps) - window + 1, window):
            values = [value for value in run.rewards[start : start + window] if value is not None]
            if values:
                points.setdefault(run.steps[start + window - 1], []).append(float(np.mean(values)))
    return points


def _plot_band(axes: Axes, points: Mapping[int, Sequence[float]], label: str, index: int) -> None:
    if not points:
        return
    steps = sorted(points)
    estimates = [mean_over_seeds(points[step]) for step in steps]
    axes.plot(steps, [item.value for item in estimates], **line_plot_options(index), label=label, linewidth=1.6)
    axes.fill_between(
        steps,
        [item.low for item in estimates],
        [item.high for item in estimates],
        color=line_plot_options(index)["color"],
        alpha=0.15,
        linewidth=0,
    )
