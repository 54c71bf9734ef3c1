"""Report of a measurement from stored moments: a table, a JSON record and plots."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.errors import WorldError
from agentrl.lab.results import (
    MEASURED,
    Energies,
    MeasurementFiles,
    PlottedTrajectories,
    ProblemLine,
    measured_problems,
)
from agentrl.lab.settings import LabSettings
from agentrl.lab.summary import (
    EstimatorResult,
    IntervalEstimate,
    as_records,
    describe_findings,
    energy_correlations,
    is_token_baseline,
    proxy_energies,
    summarize_estimators,
)
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.plots import BLUE, GREY, ORANGE, add_caption, line_options, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MARKERS = "osD^vPX"  # their number differs from the number of colors, so combinations repeat late


def draw_all(folder: Path, lines: Sequence[EstimatorResult], problems: Sequence[ProblemLine]) -> list[Path]:
    """Draw every plot that has data into ``folder``. Returns the files."""
    energies = [line["energies"] for line in problems if line["energies"] is not None]
    shown = [(line["energies"], line["shown"]) for line in problems]
    pairs = [(energy, tokens) for energy, tokens in shown if energy is not None and tokens is not None]
    drawn = {"noise.png": _noise(lines)}
    if pairs:
        drawn["energy.png"] = _energy(energies, pairs)
        drawn["proxies.png"] = _proxies(energies)
    advantages = _advantages([tokens for _, tokens in pairs])
    if advantages is not None:
        drawn["advantages.png"] = advantages
    measured = sum(line["outcome"] == MEASURED for line in problems)
    for figure in drawn.values():
        add_caption(
            figure, f"{folder.resolve().name}: one policy, {measured} problems; bars are 95 % intervals over problems"
        )
    return [save_figure(figure, folder / name) for name, figure in drawn.items()]


def _noise(lines: Sequence[EstimatorResult]) -> Figure:
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
        # Shift the estimators horizontally, because intervals at the same position would overlap.
        sizes = np.array([line.group_size for line in of_estimator]) * 1.035 ** (index - len(names) / 2)
        for axes, of in zip(panels, draws, strict=True):
            estimates = [of(line) for line in of_estimator]
            values = np.array([item.value if np.isfinite(item.value) else np.nan for item in estimates])
            spread = np.abs(
                [[item.value - item.low for item in estimates], [item.high - item.value for item in estimates]]
            )
            axes.errorbar(
                sizes, values, yerr=np.where(np.isfinite(spread), spread, 0.0), **line_options(index),
                marker=_MARKERS[index % len(_MARKERS)], markersize=4.5, linewidth=1.1, elinewidth=0.8, capsize=2,
                label=name,
            )  # fmt: skip
    _style_axes(panels[0], "Noise of one group's gradient", "variance / squared signal")
    _style_axes(panels[1], "Noise along the true gradient", "variance / squared signal, along it")
    _style_axes(panels[2], "Scale of the mean gradient (1: unbiased)", "along the true gradient")
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


def _energy(energies: Sequence[Energies], shown: Sequence[tuple[Energies, PlottedTrajectories]]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(12.0, 3.9)
    first, second, third = figure.subplots(1, 3)
    example, tokens = max(shown, key=lambda pair: float(np.std(pair[0]["length"])))
    rows = range(len(tokens["realized"]))
    first.bar(list(rows), [example["exact"][row] for row in rows],
              color=[BLUE if example["returns"][row] > 0 else ORANGE for row in rows])  # fmt: skip
    first.set_xlabel("trajectory of one problem (blue: rewarded)")
    _style_axes(first, "Exact total energy", r"$\|\nabla \log \pi(\tau)\|^2$")
    for row, values in enumerate(tokens["realized"]):
        second.plot(range(1, len(values) + 1), values, **line_options(row), linewidth=1.3)
    second.set_xlabel("model token k")
    _style_axes(second, "Realized energy, the same trajectories", r"$W_k = \sum_{j\leq k} w_j$")
    lengths, energy, returns = (
        np.concatenate([item[name] for item in energies]) for name in ("length", "exact", "returns")
    )
    for chosen, color, label in ((returns > 0, BLUE, "rewarded"), (returns <= 0, ORANGE, "not rewarded")):
        third.scatter(lengths[chosen], energy[chosen], s=9, alpha=0.45, color=color, linewidths=0, label=label)
    third.set_yscale("log")
    third.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    third.set_xlabel("model tokens of the trajectory")
    _style_axes(third, "Exact energy against length", r"$\|\nabla \log \pi(\tau)\|^2$")
    third.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def _advantages(shown: Sequence[PlottedTrajectories]) -> Figure | None:
    """Plot the token advantages of the longest pair of a rewarded and an unrewarded trajectory."""
    from matplotlib.ticker import MaxNLocator

    both = [item["advantages"] for item in shown if item["advantages"]]
    if not both:
        return None
    longest = max(both, key=lambda item: max(len(row) for rows in item.values() for row in rows))
    figure = new_figure(11.5, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for index, (label, rows) in enumerate(longest.items()):
        for axes, values in zip(panels, rows, strict=True):
            axes.step(
                range(1, len(values) + 1), values, where="mid", **line_options(index), linewidth=1.2, label=label,
            )  # fmt: skip
    for axes, title in zip(panels, ("Rewarded trajectory", "Unrewarded trajectory, same group"), strict=True):
        _style_axes(axes, title, "advantage")
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_xlabel("model token k")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7.5, frameon=False)
    return figure


def _proxies(energies: Sequence[Energies]) -> Figure:
    figure = new_figure(12.0, 3.9)
    exact = np.concatenate([item["exact"] for item in energies])
    correlations = energy_correlations(energies)
    titles = {"logit_proxy": "Logit-gradient proxy", "head_exact": "Head-exact, diagonal", "length": "Length"}
    axes_of = figure.subplots(1, len(titles))
    for axes, (name, parts) in zip(axes_of, proxy_energies(energies).items(), strict=True):
        axes.scatter(np.concatenate(parts), exact, s=9, alpha=0.45, color=BLUE, linewidths=0)
        correlation = correlations[name]
        text = f"Pearson {correlation['pearson']:.2f}, Spearman {correlation['spearman']:.2f}, within problems "
        text += f"{correlation['pearson_within_problems']:.2f}"
        axes.set_yscale("log")
        axes.set_xlabel(f"sum over the trajectory\n{text}", fontsize=8)
        _style_axes(axes, titles[name], r"exact $\|\nabla \log \pi(\tau)\|^2$")
    return figure


def _style_axes(axes: Axes, title: str, label: str) -> None:
    style_axes(axes, title)
    axes.set_ylabel(label)


_BASELINE = "rloo"


def report_results(
    results: MeasurementFiles, lab: LabSettings, console: Console, *, seed: int
) -> list[EstimatorResult]:
    """Print and write the results of the first ``lab.problems`` measured problems.

    Raises WorldError if fewer than two problems were measured.
    """
    lines = _counted(results.lines(), lab, console)
    problems = measured_problems(lines)
    labels = list(next(iter(problems[0].moments.values())))
    baseline = lab.baseline or (_BASELINE if _BASELINE in labels else None)
    summary = summarize_estimators(
        [item.moments for item in problems], resamples=lab.bootstrap, seed=seed, baseline=baseline
    )
    messages = describe_findings(summary)
    _show(console, summary, messages, baseline)
    energies = [item.line["energies"] for item in problems if item.line["energies"] is not None]
    record = {
        "settings": results.settings(),
        "baseline": baseline,
        "bootstrap": lab.bootstrap,
        "played": len(lines),
        "measured": len(problems),
        "lines": as_records(summary),
        "energy_correlations": energy_correlations(energies) if energies else None,
        "verdicts": messages,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False).encode()
    atomic_write(results.folder / "variance.json", lambda out: out.writelines([text]))
    for path in draw_all(results.folder, summary, [item.line for item in problems]):
        console.note(f"plot: {path}")
    return summary


def _counted(lines: Sequence[ProblemLine], lab: LabSettings, console: Console) -> list[ProblemLine]:
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


def _show(console: Console, lines: Sequence[EstimatorResult], messages: Sequence[str], baseline: str | None) -> None:
    columns: dict[str, Callable[[EstimatorResult], str]] = {
        "N": lambda line: str(line.group_size),
        "estimator": lambda line: line.estimator,
        "noise": lambda line: str(line.noise),
        f"to {baseline}": lambda line: _text(line.to_baseline),
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


def _text(value: IntervalEstimate | None) -> str:
    return "" if value is None else str(value)
