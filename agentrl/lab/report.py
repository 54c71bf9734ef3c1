"""Report of a measurement from stored moments: a table, a JSON record and a plot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl.errors import WorldError
from agentrl.lab.results import MEASURED, MeasurementFiles, ProblemLine, measured_problems
from agentrl.lab.settings import LabSettings
from agentrl.lab.summary import (
    EstimatorResult,
    IntervalEstimate,
    as_records,
    describe_findings,
    is_token_baseline,
    summarize_estimators,
)
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.plots import GREY, add_caption, line_plot_options, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_RESAMPLES = 2000  # bootstrap resamples of problems for the 95 % intervals
_BASELINE = "rloo"
_MARKERS = "osD^vPX"  # coprime to the number of colours, so that all combinations are used before one repeats


def _draw_noise(lines: Sequence[EstimatorResult]) -> Figure:
    figure = new_figure(15.5, 4.8)
    names = sorted({line.estimator for line in lines}, key=lambda name: (is_token_baseline(name), name))
    panels = figure.subplots(1, 3)
    draws: tuple[Callable[[EstimatorResult], IntervalEstimate], ...] = (
        lambda line: line.noise,
        lambda line: line.directional,
        lambda line: line.scale,
    )
    for index, name in enumerate(names):
        of_estimator = sorted((line for line in lines if line.estimator == name), key=lambda line: line.group_size)
        # Shift each estimator's points horizontally, because intervals at the same position would overlap.
        sizes = np.array([line.group_size for line in of_estimator]) * 1.035 ** (index - len(names) / 2)
        for axes, of in zip(panels, draws, strict=True):
            estimates = [of(line) for line in of_estimator]
            values = np.array([item.value if np.isfinite(item.value) else np.nan for item in estimates])
            spread = np.abs(
                [[item.value - item.low for item in estimates], [item.high - item.value for item in estimates]]
            )
            axes.errorbar(
                sizes, values, yerr=np.where(np.isfinite(spread), spread, 0.0), **line_plot_options(index),
                marker=_MARKERS[index % len(_MARKERS)], markersize=4.5, linewidth=1.1, elinewidth=0.8, capsize=2,
                label=name,
            )  # fmt: skip
    titles = {
        "Noise of one group's gradient": "variance / squared signal",
        "Noise along the true gradient": "variance / squared signal, along the gradient",
        "Scale of the mean gradient (1: unbiased)": "along the true gradient",
    }
    for axes, (title, label) in zip(panels, titles.items(), strict=True):
        style_axes(axes, title)
        axes.set_ylabel(label)
    panels[2].axhline(1.0, color=GREY, linewidth=0.8)
    for axes in panels[:2]:
        use_logarithmic_scale(axes)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("trajectories in a group, N")
        ticks = sorted({line.group_size for line in lines})
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7.5, frameon=False)
    return figure


def use_logarithmic_scale(axes: Axes) -> None:
    """Set a logarithmic vertical axis with plain decimal numbers as labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def print_and_write_results(
    results: MeasurementFiles, lab: LabSettings, console: Console, *, seed: int
) -> list[EstimatorResult]:
    """Print and write the results of the first ``lab.problems`` measured problems.

    Raises WorldError if fewer than two problems were measured.
    """
    lines = _select_and_count_lines(results.read_lines(), lab, console)
    problems = measured_problems(lines)
    labels = list(next(iter(problems[0].moments.values())))
    baseline = lab.baseline or (_BASELINE if _BASELINE in labels else None)
    summary = summarize_estimators(
        [item.moments for item in problems], resamples=_RESAMPLES, seed=seed, baseline=baseline
    )
    messages = describe_findings(summary)
    _print_table(console, summary, messages, baseline)
    record = {
        "settings": results.read_settings(),
        "baseline": baseline,
        "bootstrap": _RESAMPLES,
        "played": len(lines),
        "measured": len(problems),
        "lines": as_records(summary),
        "verdicts": messages,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False).encode()
    atomic_write(results.folder / "variance.json", lambda out: out.writelines([text]))
    figure = _draw_noise(summary)
    name = results.folder.resolve().name
    add_caption(figure, f"{name}: one policy, {len(problems)} problems; bars are 95 % intervals over problems")
    console.note(f"plot: {save_figure(figure, results.folder / 'noise.png')}")
    return summary


def _select_and_count_lines(lines: Sequence[ProblemLine], lab: LabSettings, console: Console) -> list[ProblemLine]:
    """Return the lines up to the last requested problem. Prints counts of measured and omitted problems."""
    kept: list[ProblemLine] = []
    for line in lines:
        if sum(item["outcome"] == MEASURED for item in kept) < lab.problems:
            kept.append(line)
    outcomes = Counter(line["outcome"] for line in kept)
    measured = outcomes.pop(MEASURED, 0)
    reasons = [f"{count} with {name}" for name, count in sorted(outcomes.items())]
    left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
    if measured < 2:
        raise WorldError(
            f"only {measured} of {len(kept)} problems could be measured{left_out}; a report needs at least 2: use "
            "another model, other problems or more samples"
        )
    console.note(f"measured: {measured} of {len(kept)} problems{left_out}")
    return kept


def _print_table(
    console: Console, lines: Sequence[EstimatorResult], messages: Sequence[str], baseline: str | None
) -> None:
    columns: dict[str, Callable[[EstimatorResult], str]] = {
        "N": lambda line: str(line.group_size),
        "estimator": lambda line: line.estimator,
        "noise": lambda line: str(line.noise),
        f"to {baseline}": lambda line: str(line.to_baseline),
        "to the best": lambda line: str(line.to_best),
        "directional": lambda line: str(line.directional),
        "scale": lambda line: str(line.scale),
        "cosine": lambda line: f"{line.cosine.value:.3f}",
        "bias": lambda line: f"{line.bias.value:.3f}",
        "head": lambda line: "" if line.head_variance is None else f"{line.head_variance:.3g}",
    }
    if baseline is None:
        del columns[f"to {baseline}"]
    if all(line.head_variance is None for line in lines):
        del columns["head"]
    rows = [[column(line) for column in columns.values()] for line in lines]
    console.table("Gradient of one group, least noise first; 95 % intervals over problems", list(columns), rows)
    for line in messages:
        console.note(line)
