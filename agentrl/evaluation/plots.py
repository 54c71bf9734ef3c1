"""Plots of an evaluation: scores with both intervals, pass@k, solved fraction by problem, and endings of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.telemetry.plots import (
    BLUE,
    GREEN,
    LIGHT,
    ORANGE,
    add_caption,
    add_legend_below,
    line_plot_options,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_results(results: Results, folder: Path) -> list[Path]:
    """Draw ``scores``, ``pass_at_k``, ``problems`` and ``endings`` into ``folder``. Returns the files."""
    benchmarks = results["benchmarks"]
    n = results["provenance"]["sampling"]["n"]
    panels: dict[str, tuple[str, Callable[[Axes], None]]] = {
        "scores.png": ("Scores", lambda axes: _draw_scores(axes, benchmarks, n)),
        "pass_at_k.png": ("pass@k, unbiased", lambda axes: _draw_pass_at_k(axes, benchmarks)),
        "problems.png": ("Problems by how often they are solved", lambda axes: _draw_problems(axes, benchmarks)),
        "endings.png": ("How rollouts ended", lambda axes: _draw_endings(axes, benchmarks)),
    }
    provenance = results["provenance"]
    name = f"{provenance['model']['name']}, seed {provenance['seed']}, {n} samples per problem"
    files = []
    for file, (title, draw) in panels.items():
        figure = new_figure(6.4, 4.0)
        axes = figure.add_subplot()
        draw(axes)
        style_axes(axes, title)
        add_legend_below(axes)
        add_caption(figure, name)
        files.append(save_figure(figure, folder / file))
    return files


def _draw_scores(axes: Axes, benchmarks: Mapping[str, BenchmarkResults], n: int) -> None:
    for index, one in enumerate(benchmarks.values()):
        mean = one["avg"]["mean"]
        ours, like = one["avg"]["this_benchmark"], one["avg"]["problems_like_these"]
        for name, interval, color, shift in (
            ("this benchmark", ours, BLUE, -0.08),
            ("problems like these", like, ORANGE, 0.08),
        ):
            error = [[mean - interval["low"]], [interval["high"] - mean]]
            label = f"95 % {name}" if index == 0 else None
            axes.errorbar([index + shift], [mean], yerr=error, color=color, fmt="o", capsize=4, label=label)
        if one["maj"] is not None:
            axes.plot(
                [index], [one["maj"]], marker="D", color=GREEN, linestyle="", label=f"maj@{n}" if index == 0 else None
            )
    names = [f"{name}\n{one['avg']['problems']} problems" for name, one in benchmarks.items()]
    axes.set_xticks(range(len(benchmarks)), names)
    axes.set_xlim(-0.6, len(benchmarks) - 0.4)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(f"avg@{n}")


def _draw_pass_at_k(axes: Axes, benchmarks: Mapping[str, BenchmarkResults]) -> None:
    ticks: set[int] = set()
    for index, (name, one) in enumerate(benchmarks.items()):
        values = {int(k): value["value"] for k, value in one["pass"].items() if value is not None}
        axes.plot(list(values), list(values.values()), marker="o", **line_plot_options(index), label=name)
        ticks |= set(values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k")


def _draw_problems(axes: Axes, benchmarks: Mapping[str, BenchmarkResults]) -> None:
    for index, (name, one) in enumerate(benchmarks.items()):
        played = [part for part in one["per_problem"].values() if part["samples"]]
        shares = sorted((part["correct"] / part["samples"] for part in played), reverse=True)
        steps = [(rank + 0.5) / len(shares) for rank in range(len(shares))]
        axes.step(steps, shares, where="mid", **line_plot_options(index), label=name)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("share of the problems, easiest first")
    axes.set_ylabel("share of samples correct")


def _draw_endings(axes: Axes, benchmarks: Mapping[str, BenchmarkResults]) -> None:
    kinds = sorted({kind for one in benchmarks.values() for kind in one["ended"]})
    bottom = [0.0] * len(benchmarks)
    for index, kind in enumerate(kinds):
        shares = [one["ended"].get(kind, 0) / sum(one["ended"].values()) for one in benchmarks.values()]
        axes.bar(list(benchmarks), shares, 0.6, bottom, color=LIGHT[index % len(LIGHT)], label=kind.replace("_", " "))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of rollouts, without excluded ones")
