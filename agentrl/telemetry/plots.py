"""Pictures of a run, from its ``metrics.jsonl``: one PNG a subject and one overview. What was not measured is left out.

Rows with ``reward/...`` and so on are training steps, rows with ``eval/...`` are evaluations. Shaded bands and error
bars are 95 % intervals (``reward/mean`` +- 1.96 ``reward/stderr``; ``eval/low`` to ``eval/high``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.metrics.catalogue import METRICS
from agentrl.telemetry.metrics.definitions import USER_METRICS, Metric
from agentrl.telemetry.palette import DARK, INK, LIGHT, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, float]
Draw = Callable[["Axes", Sequence[Row]], bool]

BLUE, ORANGE, _, VIOLET, SKY, GREEN, BROWN, RED = LIGHT
GREY, CYCLE = "#8a8f98", LIGHT
_DOTS_PER_INCH = 140
_WINDOW = 15  # steps of the running mean


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One subject: the file it is drawn to and the function that draws it, which returns False without data."""

    file: str
    title: str
    draw: Draw


def draw_plots(rows: Iterable[Row], folder: Path, title: str = "") -> list[Path]:
    """Draw every panel that has data, and ``overview.png`` of them all, into ``folder``; returns the files.

    The overview has ``title``, usually the name of the run, and a twin for dark pages, ``overview-dark.png``.
    """
    measured = list(rows)
    drawn: list[Panel] = []
    files = []
    for panel in (*PANELS, *_user_panels()):
        figure = _figure(6.4, 4.0)
        if _draw(panel, figure.add_subplot(), measured):
            drawn.append(panel)
            files.append(_save(figure, folder / panel.file))
    if drawn:
        overview = _overview(drawn, measured)
        overview.suptitle(f"{title or 'Overview'}: one run, bands and bars are 95 % intervals", x=0.01, ha="left")
        files += save_twins(overview, folder / "overview.png")
    return files


def series(rows: Iterable[Row], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of ``key`` in the rows that have it."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def running_mean(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """The mean of each value and its neighbours, ``window`` (odd) in all, fewer at the ends.

    >>> running_mean([1.0, 3.0, 8.0, 1.0], window=3)
    [2.0, 4.0, 4.0, 4.5]
    """
    half = window // 2
    parts = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _overview(panels: Sequence[Panel], rows: Sequence[Row]) -> Figure:
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(5.0 * columns, 3.4 * lines)
    for place, panel in enumerate(panels, start=1):
        _draw(panel, figure.add_subplot(lines, columns, place), rows)
    return figure


def _draw(panel: Panel, axes: Axes, rows: Sequence[Row]) -> bool:
    from matplotlib.ticker import MaxNLocator

    if not panel.draw(axes, rows):
        return False
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none", loc="best")
    return True


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


def save_twins(figure: Figure, path: Path) -> list[Path]:
    """Write the figure for light pages to ``path``, and for dark ones to ``NAME-dark.png``."""
    light = _save(figure, path)
    _darken(figure)
    return [light, _save(figure, path.with_name(f"{path.stem}-dark.png"))]


def _darken(figure: Figure) -> None:
    """Replace the colours of a figure by those for dark pages. Greys, white and black become their counterparts."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_hex, to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    pairs = dict(zip(LIGHT, DARK, strict=True))

    def dark(colour: Any) -> Any:
        red, green, blue, alpha = to_rgba(colour)
        if to_hex(colour) in pairs:
            return to_rgba(pairs[to_hex(colour)], alpha)
        if max(red, green, blue) - min(red, green, blue) > 0.06:
            return colour
        paper, ink = to_rgba(PAPER[1]), to_rgba(INK[1])
        share = (red + green + blue) / 3  # 1: paper, 0: ink
        mixed = [share * low + (1 - share) * high for low, high in zip(paper[:3], ink[:3], strict=True)]
        return (*mixed, alpha)

    for item in figure.findobj():
        if isinstance(item, Line2D | Text):
            item.set_color(dark(item.get_color()))
        elif isinstance(item, Patch):
            face, edge = dark(item.get_facecolor()), dark(item.get_edgecolor())
            item.set(facecolor=face, edgecolor=edge)
        elif isinstance(item, Collection):
            faces, edges = item.get_facecolor(), item.get_edgecolor()
            item.set(facecolor=[dark(each) for each in faces], edgecolor=[dark(each) for each in edges])


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda out: figure.savefig(out, format="png"))
    return path


def _line(axes: Axes, rows: Sequence[Row], key: str, label: str | None, color: str) -> bool:
    """One measured line: the steps pale, their running mean strong; few steps are drawn as they are."""
    steps, values = series(rows, key)
    if not steps:
        return False
    smooth = len(steps) > 2 * _WINDOW
    axes.plot(steps, values, color=color, linewidth=0.9 if smooth else 1.6, alpha=0.35 if smooth else 1.0,
              marker="o" if len(steps) == 1 else None, label=None if smooth else label)  # fmt: skip
    if smooth:
        axes.plot(steps, running_mean(values), color=color, linewidth=1.8, label=label)
    return True


def _reward(axes: Axes, rows: Sequence[Row]) -> bool:
    steps, means = series(rows, "reward/mean")
    if not _line(axes, rows, "reward/mean", f"mean over {_WINDOW} steps" if len(steps) > 2 * _WINDOW else None, BLUE):
        return False
    errors = {row["step"]: row["reward/stderr"] for row in rows if row.get("reward/stderr") is not None}
    half = [1.96 * errors.get(step, 0.0) for step in steps]
    if errors:
        low = [mean - width for mean, width in zip(means, half, strict=True)]
        high = [mean + width for mean, width in zip(means, half, strict=True)]
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="95 % interval of a step")
    axes.set_ylabel("reward per trajectory")
    return True


def _evaluation(axes: Axes, rows: Sequence[Row]) -> bool:
    evaluations = [row for row in rows if row.get("eval/avg_at_k") is not None]
    if not evaluations:
        return False
    families = sorted({key for row in evaluations for key in row if key.startswith("eval/family/")})
    for place, key in enumerate(families):
        steps, values = series(evaluations, key)
        name = key.removeprefix("eval/family/")
        color = CYCLE[(place + 1) % len(CYCLE)]
        axes.plot(steps, values, color=color, linewidth=1.0, marker=".", alpha=0.75,
                  label=name if len(families) <= 7 else None)  # fmt: skip
    steps, means = series(evaluations, "eval/avg_at_k")
    # Rows of older runs may hold a bound that lies a rounding error on the wrong side of its mean.
    below = [max(mean - row.get("eval/low", mean), 0.0) for mean, row in zip(means, evaluations, strict=True)]
    above = [max(row.get("eval/high", mean) - mean, 0.0) for mean, row in zip(means, evaluations, strict=True)]
    k = evaluations[-1].get("eval/k", "k")
    axes.errorbar(steps, means, yerr=[below, above], color=BLUE, linewidth=2.0, marker="o", capsize=4,
                  label="all, 95 % interval")  # fmt: skip
    axes.set_ylabel(f"avg@{k}: share of answers correct")
    axes.set_ylim(-0.03, 1.03)
    return True


def _lines(label: str, lines: Mapping[str, str], *, logarithmic: bool = False) -> Draw:
    """Draws metrics by name in these colors, on request on a logarithmic axis where anything is above zero."""

    def draw(axes: Axes, rows: Sequence[Row]) -> bool:
        drawn = [key for key, color in lines.items() if _line(axes, rows, key, METRICS[key].label, color)]
        if logarithmic and any(value > 0 for key in drawn for value in series(rows, key)[1]):
            axes.set_yscale("log", nonpositive="mask")
        axes.set_ylabel(label)
        return bool(drawn)

    return draw


def _endings(axes: Axes, rows: Sequence[Row]) -> bool:
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
    axes.stackplot([row["step"] for row in steps], shares, labels=labels, colors=CYCLE, alpha=0.85)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of trajectories")
    return True


def _single(metric: Metric, color: str) -> Draw:
    """Draws one metric; the axis has its name and unit."""

    def draw(axes: Axes, rows: Sequence[Row]) -> bool:
        axes.set_ylabel(
            f"{metric.label or metric.name} ({metric.unit})" if metric.unit else metric.label or metric.name
        )
        return _line(axes, rows, metric.name, None, color)

    return draw


def _user_panels() -> list[Panel]:
    entries = [USER_METRICS[name] for name in USER_METRICS.names()]
    return [
        Panel(file=f"{own.metric.name.replace('/', '_')}.png", title=own.metric.name, draw=_single(own.metric, BLUE))
        for own in entries
        if own.plot
    ]


_VARIANCE = {
    "variance/total_power": BLUE,
    "variance/signal_strength": SKY,
    "variance/pure_noise": VIOLET,
    "variance/head_exact_total_power": ORANGE,
    "variance/head_exact_signal_strength": GREEN,
    "variance/head_exact_pure_noise": RED,
}
_entropy = _single(METRICS["policy/entropy"], VIOLET)
_gradient_norm = _single(METRICS["policy/gradient_norm"], ORANGE)
_variance = _lines("gradient variance (squared norm)", _VARIANCE, logarithmic=True)
_tool_use = _lines("mean per trajectory", {"rollout/turns_mean": BLUE, "rollout/tool_calls_mean": ORANGE})
_length = _lines("tokens per trajectory", {"rollout/response_tokens_mean": BLUE, "rollout/model_tokens_mean": GREEN})
_engine_policy = _lines(
    "engine against policy (nats per token)",
    {"policy/kl_engine_k3": BLUE, "policy/engine_abs_diff": ORANGE},
    logarithmic=True,
)

PANELS = (
    Panel(file="reward.png", title="Training reward", draw=_reward),
    Panel(file="avg_at_k.png", title="Held-out problems", draw=_evaluation),
    Panel(file="entropy.png", title="Policy entropy", draw=_entropy),
    Panel(file="gradient_norm.png", title="Gradient norm", draw=_gradient_norm),
    Panel(file="variance.png", title="Variance diagnostics", draw=_variance),
    Panel(file="tool_use.png", title="Turns and tool calls", draw=_tool_use),
    Panel(file="response_length.png", title="Response length", draw=_length),
    Panel(file="engine_policy.png", title="Engine-policy difference", draw=_engine_policy),
    Panel(file="endings.png", title="How trajectories ended", draw=_endings),
)
