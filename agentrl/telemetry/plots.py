"""Plots of a run from its ``metrics.jsonl``: one PNG per subject and an overview. Subjects without values are omitted.

Shaded bands and error bars are 95 % intervals: ``reward/mean`` +- 1.96 ``reward/stderr``, and ``eval/low`` to
``eval/high``. Evaluations, studies and measurements style their figures with this module.

Plots, viewer and reports share the palette, whose dark version only the viewer uses. Any two of its colours differ by
at least 20 in CIELAB, also under simulated deuteranopia (tests/telemetry/test_palette.py). Lines also differ in their
dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.metrics import METRICS, USER_METRICS, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = ("#0050ba", "#f2750a", "#081121", "#972879", "#45a2e0", "#559f72", "#765b00", "#4a0300")
DARK = ("#0079ff", "#ed7832", "#ffffba", "#f2a0ff", "#106ea7", "#32d2aa", "#ffe900", "#81653b")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1, 1.5), (6, 2, 1, 2))  # dashes and gaps in units of line width
LINE_STYLES = 16  # number of lines that can be distinguished
_VIEWER_LINE_WIDTH = 1.8  # width of the viewer's lines in pixels


def line_style(index: int) -> tuple[int, tuple[float, ...]]:
    """Return the palette index and the dashes of the n-th line (from 0). Adjacent lines differ in both.

    >>> [line_style(index) for index in (0, 1, 8, 17)]
    [(0, ()), (1, (4, 2)), (0, (4, 2)), (1, (6, 2, 1, 2))]
    """
    return index % len(LIGHT), DASHES[(index + index // len(LIGHT)) % len(DASHES)]


def palette_css() -> str:
    """Return a style sheet with colours and dashes, ``--line-1`` to ``--line-16`` and ``--dash-1`` to ``--dash-16``."""

    def dashes(index: int) -> str:
        return " ".join(f"{length * _VIEWER_LINE_WIDTH:g}" for length in line_style(index)[1]) or "none"

    def css_colors(palette: tuple[str, ...]) -> str:
        return " ".join(f"--line-{index + 1}: {palette[line_style(index)[0]]};" for index in range(LINE_STYLES))

    strokes = " ".join(f"--dash-{index + 1}: {dashes(index)};" for index in range(LINE_STYLES))
    return (
        f":root {{ {css_colors(LIGHT)} {strokes} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {css_colors(DARK)} }} }}\n"
    )


Row = Mapping[str, float]
Draw = Callable[["Axes", Sequence[Row]], bool]

BLUE, ORANGE, GREEN = LIGHT[0], LIGHT[1], LIGHT[5]
GREY = "#8a8f98"
_DOTS_PER_INCH = 140
_LABEL_HEIGHT = 32  # points from the x axis to the lower edge of its label
_WINDOW = 15  # number of steps in the running mean


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A plot of one subject. ``draw`` returns False if there are no values."""

    file: str
    title: str
    draw: Draw


def draw_plots(rows: Iterable[Row], folder: Path, title: str) -> list[Path]:
    """Draw every panel that has values, and an ``overview.png`` of all panels, into ``folder``. Returns the files.

    ``title`` is printed on each plot, such as the name, the seed and the step size of the run.
    """
    measured = list(rows)
    drawn: list[Panel] = []
    files = []
    for panel in (*PANELS, *_user_panels()):
        figure = new_figure(6.4, 4.0)
        if _draw_panel(panel, figure.add_subplot(), measured):
            drawn.append(panel)
            add_caption(figure, title)
            files.append(save_figure(figure, folder / panel.file))
    if drawn:
        overview = _draw_overview(drawn, measured)
        add_caption(overview, f"{title}; one run, bands and bars are 95 % intervals")
        files.append(save_figure(overview, folder / "overview.png"))
    return files


def extract_metric_series(rows: Iterable[Row], key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of ``key`` from the rows that have it."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Compute the moving average over ``window`` (odd) values, or fewer at the ends.

    >>> running_mean([1.0, 3.0, 8.0, 1.0], window=3)
    [2.0, 4.0, 4.0, 4.5]
    """
    half = window // 2
    parts = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _draw_overview(panels: Sequence[Panel], rows: Sequence[Row]) -> Figure:
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(5.0 * columns, 3.6 * lines)
    for index, panel in enumerate(panels, start=1):
        _draw_panel(panel, figure.add_subplot(lines, columns, index), rows)
    return figure


def _draw_panel(panel: Panel, axes: Axes, rows: Sequence[Row]) -> bool:
    from matplotlib.ticker import MaxNLocator

    if not panel.draw(axes, rows):
        return False
    style_axes(axes, panel.title)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    add_legend_below(axes)
    return True


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure with ``width`` and ``height`` in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


def add_caption(figure: Figure, text: str) -> None:
    """Add a caption above a figure."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=9)


def style_axes(axes: Axes, title: str) -> None:
    """Add a title and horizontal grid lines to axes, and remove the frame."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


def add_legend_below(axes: Axes, columns: int = 2) -> None:
    """Add a legend below the label of the x axis, where it does not cover lines."""
    from matplotlib.transforms import ScaledTranslation

    if not axes.get_legend_handles_labels()[1]:
        return
    shift = ScaledTranslation(0, -_LABEL_HEIGHT / 72, axes.figure.dpi_scale_trans)
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=columns, handlelength=3.2, borderaxespad=0,
                bbox_to_anchor=(0, 0), bbox_transform=axes.transAxes + shift)  # fmt: skip


def line_plot_options(index: int) -> dict[str, Any]:
    """Return the colour and dashes of the n-th line of a plot as matplotlib arguments."""
    color, dashes = line_style(index)
    return {"color": LIGHT[color], "linestyle": (0, dashes) if dashes else "-"}


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to ``path`` as PNG. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda out: figure.savefig(out, format="png"))
    return path


def _draw_metric(axes: Axes, rows: Sequence[Row], key: str, label: str | None, index: int = 0) -> bool:
    """Draw the n-th line: the values in a pale colour with a bold running mean, or only the values if there are few."""
    steps, values = extract_metric_series(rows, key)
    if not steps:
        return False
    smooth = len(steps) > 2 * _WINDOW
    if smooth:
        axes.plot(steps, values, color=line_plot_options(index)["color"], linewidth=0.9, alpha=0.35)
    axes.plot(steps, running_mean(values) if smooth else values, **line_plot_options(index), linewidth=1.8, label=label,
              marker="o" if len(steps) == 1 else None)  # fmt: skip
    return True


def _draw_reward(axes: Axes, rows: Sequence[Row]) -> bool:
    steps, means = extract_metric_series(rows, "reward/mean")
    if not _draw_metric(axes, rows, "reward/mean", f"mean over {_WINDOW} steps" if len(steps) > 2 * _WINDOW else None):
        return False
    errors = {row["step"]: row["reward/stderr"] for row in rows if row.get("reward/stderr") is not None}
    half = [1.96 * errors.get(step, 0.0) for step in steps]
    if errors:
        low = [mean - width for mean, width in zip(means, half, strict=True)]
        high = [mean + width for mean, width in zip(means, half, strict=True)]
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="95 % interval of a step")
    axes.set_ylabel("reward per trajectory")
    return True


def _draw_evaluations(axes: Axes, rows: Sequence[Row]) -> bool:
    evaluations = [row for row in rows if row.get("eval/avg_at_k") is not None]
    if not evaluations:
        return False
    families = sorted({key for row in evaluations for key in row if key.startswith("eval/family/")})
    for index, key in enumerate(families, start=1):
        steps, values = extract_metric_series(evaluations, key)
        name = key.removeprefix("eval/family/")
        axes.plot(steps, values, **line_plot_options(index), linewidth=1.0, marker=".",
                  label=name if len(families) <= 7 else None)  # fmt: skip
    steps, means = extract_metric_series(evaluations, "eval/avg_at_k")
    # In rows of older versions, rounding may have moved a bound past its mean.
    below = [max(mean - row.get("eval/low", mean), 0.0) for mean, row in zip(means, evaluations, strict=True)]
    above = [max(row.get("eval/high", mean) - mean, 0.0) for mean, row in zip(means, evaluations, strict=True)]
    last = evaluations[-1]
    k, problems = last.get("eval/k", "k"), last.get("eval/problems")
    every = "all" if problems is None else f"all {problems:g} problems"
    axes.errorbar(steps, means, yerr=[below, above], **line_plot_options(0), linewidth=2.0, marker="o", capsize=4,
                  label=f"{every}, 95 % interval")  # fmt: skip
    axes.set_ylabel(f"avg@{k}: share of answers correct")
    axes.set_ylim(-0.03, 1.03)
    return True


def _drawer_of_metrics(label: str, *names: str, logarithmic: bool = False) -> Draw:
    """Build a function that draws the metrics ``names``, on a logarithmic axis if requested and possible."""

    def draw(axes: Axes, rows: Sequence[Row]) -> bool:
        drawn = [key for index, key in enumerate(names) if _draw_metric(axes, rows, key, METRICS[key].label, index)]
        if logarithmic and any(value > 0 for key in drawn for value in extract_metric_series(rows, key)[1]):
            axes.set_yscale("log", nonpositive="mask")
        axes.set_ylabel(label)
        return bool(drawn)

    return draw


def _draw_endings(axes: Axes, rows: Sequence[Row]) -> bool:
    prefix = "rollout/ended/"
    steps = [row for row in rows if any(key.startswith(prefix) for key in row)]
    names = sorted({key for row in steps for key in row if key.startswith(prefix)})
    if not names:
        return False
    totals = [sum(row.get(name, 0.0) for name in names) or 1.0 for row in steps]
    shares = [
        running_mean([row.get(name, 0.0) / whole for row, whole in zip(steps, totals, strict=True)]) for name in names
    ]
    labels = [name.removeprefix(prefix).replace("_", " ") for name in names]
    axes.stackplot([row["step"] for row in steps], shares, labels=labels, colors=LIGHT, alpha=0.85)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of trajectories")
    return True


def _drawer_of_metric(metric: Metric) -> Draw:
    """Build a function that draws one metric on an axis with its name and unit."""

    def draw(axes: Axes, rows: Sequence[Row]) -> bool:
        axes.set_ylabel(
            f"{metric.label or metric.name} ({metric.unit})" if metric.unit else metric.label or metric.name
        )
        return _draw_metric(axes, rows, metric.name, None)

    return draw


def _user_panels() -> list[Panel]:
    entries = [USER_METRICS[name] for name in USER_METRICS.names()]
    return [
        Panel(
            file=f"{entry.metric.name.replace('/', '_')}.png",
            title=entry.metric.name,
            draw=_drawer_of_metric(entry.metric),
        )
        for entry in entries
        if entry.plot
    ]


PANELS = (
    Panel(file="reward.png", title="Training reward", draw=_draw_reward),
    Panel(file="avg_at_k.png", title="Held-out problems", draw=_draw_evaluations),
    Panel(file="entropy.png", title="Policy entropy", draw=_drawer_of_metric(METRICS["policy/entropy"])),
    Panel(file="gradient_norm.png", title="Gradient norm", draw=_drawer_of_metric(METRICS["policy/gradient_norm"])),
    Panel(
        file="variance.png",
        title="Variance diagnostics",
        draw=_drawer_of_metrics(
            "gradient variance (squared norm)",
            "variance/total_power",
            "variance/signal_strength",
            "variance/pure_noise",
            "variance/head_exact_total_power",
            "variance/head_exact_signal_strength",
            "variance/head_exact_pure_noise",
            logarithmic=True,
        ),
    ),
    Panel(
        file="tool_use.png",
        title="Turns and tool calls",
        draw=_drawer_of_metrics("mean per trajectory", "rollout/turns_mean", "rollout/tool_calls_mean"),
    ),
    Panel(
        file="response_length.png",
        title="Response length",
        draw=_drawer_of_metrics("tokens per trajectory", "rollout/response_tokens_mean", "rollout/model_tokens_mean"),
    ),
    Panel(
        file="engine_policy.png",
        title="Engine-policy difference",
        draw=_drawer_of_metrics(
            "engine against policy (nats per token)",
            "policy/engine_abs_diff",
            "policy/kl_engine_k3",
            logarithmic=True,
        ),
    ),
    Panel(file="endings.png", title="How trajectories ended", draw=_draw_endings),
)
