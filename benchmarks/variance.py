"""Print the tables and draw the figure of the variance laboratory's studies, from their stored problems.

Nothing is sampled: `benchmarks/studies/variance/NAME/` contains the settings of a measurement and one line per problem,
as `agentrl variance` wrote them. The command can continue such a directory as its `--output`. `--keep DIR` copies a
measurement there. `study_tables.py` writes the printed tables to benchmarks/studies/variance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl.lab.report import use_logarithmic_scale
from agentrl.lab.results import PROBLEMS, SETTINGS, MeasuredProblem, MeasurementFiles, ProblemLine, measured_problems
from agentrl.lab.summary import EstimatorResult, IntervalEstimate, summarize_estimators
from agentrl.telemetry.files import atomic_write, encode_json_line
from agentrl.telemetry.plots import add_caption, add_legend_below, line_plot_options, new_figure, style_axes

STUDIES = Path(__file__).parent / "studies" / "variance"
DRAWN = ("grpo", "ogb", "ogb_pooled", "otb_isolated", "tir_otb")


def main() -> None:
    """Store a measurement, or print the tables and draw the figure of all stored measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy this output directory of agentrl variance")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="PNG file: noise against N, for studies with three or more sizes"
    )
    parser.add_argument("--baseline", default="rloo", help="estimator relative to which noise is printed")
    parser.add_argument(
        "--resamples", type=int, default=10_000, help="bootstrap resamples of the problems for each 95 %% interval"
    )
    arguments = parser.parse_args()
    if arguments.keep is not None:
        keep(arguments.keep, STUDIES / arguments.keep.name)
        return
    found, counts = {}, {}
    for folder in sorted(path.parent for path in STUDIES.glob(f"*/{PROBLEMS}")):
        problems = measured_problems(MeasurementFiles(folder).read_lines())
        if len(problems) > 1 and arguments.baseline in next(iter(problems[0].moments.values())):
            moments = [item.moments for item in problems]
            counts[folder.name] = len(problems)
            found[folder.name] = summarize_estimators(
                moments, resamples=arguments.resamples, seed=0, baseline=arguments.baseline
            )
            print_study(
                folder.name, MeasurementFiles(folder).read_lines(), problems, found[folder.name], arguments.baseline
            )
    if arguments.figure is not None:
        draw(
            {name: lines for name, lines in found.items() if len({line.group_size for line in lines}) > 2},
            counts,
            arguments.figure,
            arguments.baseline,
        )
        print(f"drawn: {arguments.figure}")


def keep(source: Path, target: Path) -> None:
    """Copy a measurement, with moments to four digits."""
    results = MeasurementFiles(source)
    settings, lines = results.read_settings(), results.read_lines()
    target.mkdir(parents=True, exist_ok=True)
    (target / PROBLEMS).unlink(missing_ok=True)
    (target / SETTINGS).write_bytes(encode_json_line({**settings, "model": source.name, "behaviour": None}))
    text = b"".join(encode_json_line({**line, "moments": shortened(line["moments"])}) for line in lines)
    atomic_write(target / PROBLEMS, lambda out: out.write(text))
    print(f"kept: {len(lines)} problems in {target}")


def shortened(moments: dict[str, dict[str, list[float | None]]] | None) -> object:
    """Round the moments of a line to four digits."""
    return moments and {
        size: {label: [value and float(f"{value:.4g}") for value in values] for label, values in found.items()}
        for size, found in moments.items()
    }


def print_study(
    name: str,
    played: Sequence[ProblemLine],
    problems: Sequence[MeasuredProblem],
    lines: Sequence[EstimatorResult],
    baseline: str,
) -> None:
    """Print the conditions, and the tables of noise and scale."""
    own = [item.line for item in problems]
    print(f"\n### {name}\n")
    print(
        f"{len(own)} of {len(played)} sampled problems were measured "
        f"({sum(line['outcome'] == 'equal rewards' for line in played)} had equal rewards). On average, the measured "
        f"problems have a reward of {np.mean([line['reward'] for line in own]):.2f}, "
        f"{np.mean([line['tokens'] for line in own]):.0f} model tokens and "
        f"{np.mean([line['turns'] for line in own]):.1f} turns."
    )
    sizes = sorted({line.group_size for line in lines})
    names = list(dict.fromkeys(line.estimator for line in lines if line.group_size == sizes[len(sizes) // 2]))
    by_key = {(line.estimator, line.group_size): line for line in lines}
    print(f"\nNoise of `{baseline}`, and of its part along the true gradient:\n")
    print(row(["quantity", *(f"N={size}" for size in sizes)]))
    print(row(["---"] * (len(sizes) + 1)))
    print(row(["noise", *(said(by_key[baseline, size].noise) for size in sizes)]))
    print(row(["along", *(said(by_key[baseline, size].directional) for size in sizes)]))
    for size in sizes:
        print(f"\nN={size}; noise relative to `{baseline}` and to the best estimator, paired by problem:\n")
        print(
            row(["estimator", f"to `{baseline}`", "to the best", f"along the true gradient, to `{baseline}`", "scale"])
        )
        print(row(["---"] * 5))
        for estimator in names:
            line = by_key[estimator, size]
            shown = (line.to_baseline, line.to_best, line.directional_to_baseline, line.scale)
            print(row([f"`{estimator}`", *map(said, shown)]))


def row(cells: Sequence[str]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def said(value: IntervalEstimate | None) -> str:
    """Format with two digits or more. A value that cannot be distinguished from noise becomes a dash."""
    if value is None or not np.isfinite(value.value):
        return "-"
    return f"{digits(value.value)} [{digits(value.low)}, {digits(value.high)}]"


def digits(value: float) -> str:
    """Format with two decimals, or with two significant digits if the value is below 0.1 or at least 10."""
    return f"{value:.2f}" if 0.1 <= abs(value) < 10 else f"{value:.2g}"


def draw(found: dict[str, list[EstimatorResult]], problems: dict[str, int], path: Path, baseline: str) -> None:
    """Draw the noise relative to the baseline against N, with one panel per study.

    ``problems`` contains the number of problems of each study.
    """
    figure = new_figure(4.6 * len(found), 4.6)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (name, lines) in zip(panels, found.items(), strict=True):
        for place, estimator in enumerate(DRAWN):
            own = sorted((line for line in lines if line.estimator == estimator), key=lambda line: line.group_size)
            ratios = [line.to_baseline for line in own if line.to_baseline is not None]
            sizes = np.array([line.group_size for line in own]) * 1.04 ** (place - len(DRAWN) / 2)
            values = np.array([item.value for item in ratios])
            spread = np.abs([[item.value - item.low for item in ratios], [item.high - item.value for item in ratios]])
            spread = np.where(np.isfinite(spread), spread, 0.0)
            axes.errorbar(sizes, values, yerr=spread, **line_plot_options(place), label=estimator,
                          marker="os^Dv"[place], markersize=4, linewidth=1.2, elinewidth=0.8, capsize=2)  # fmt: skip
        use_logarithmic_scale(axes)
        axes.axhline(1.0, color="#444444", linewidth=0.9)
        axes.set_xscale("log", base=2)
        ticks = sorted({line.group_size for line in lines})
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
        style_axes(axes, f"{name}: {problems[name]} problems")
        axes.set_xlabel("trajectories in a group, N")
    panels[0].set_ylabel(f"noise over that of {baseline}")
    add_legend_below(panels[0], columns=3)
    add_caption(figure, "one policy; bars are 95 % intervals over problems")
    atomic_write(path, lambda out: figure.savefig(out, format="png"))


if __name__ == "__main__":
    main()
