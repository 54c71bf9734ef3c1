"""Pictures of a measurement: variance against group size, energies, advantages of single tokens, proxies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.lab.choices import Choice
from agentrl.lab.groups import Partition, advantages_in
from agentrl.lab.sample import ProblemSample
from agentrl.lab.summary import OPTIMAL, Line, energy_correlations, proxy_energies
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.plots import BLUE, GREEN, GREY, ORANGE, RED, VIOLET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = (BLUE, ORANGE, GREEN, VIOLET, RED, "#b59a2c", "#3aa6a6", "#c06a9a", GREY, "#5b3a29")
_MARKERS = "osD^vPX"  # fewer than colors, so that pairs repeat late


def draw_all(
    folder: Path, lines: Sequence[Line], samples: Sequence[ProblemSample], choices: Sequence[Choice]
) -> list[Path]:
    """Draw every picture into ``folder``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "noise.png": _noise(lines),
        "energy.png": _energy(samples),
        "advantages.png": _advantages(samples, choices),
        "proxies.png": _proxies(samples),
    }
    return [_save(figure, folder / name) for name, figure in drawn.items() if figure is not None]


def _noise(lines: Sequence[Line]) -> Figure:
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = _figure(11.5, 4.6)
    names = sorted({line.estimator for line in lines}, key=lambda name: (name.split(":")[0] in OPTIMAL, name))
    left, right = figure.subplots(1, 2)
    for place, name in enumerate(names):
        own = sorted((line for line in lines if line.estimator == name), key=lambda line: line.group_size)
        # Side by side: intervals drawn on one spot hide each other.
        sizes = np.array([line.group_size for line in own]) * 1.035 ** (place - len(names) / 2)
        for axes, key in ((left, "noise"), (right, "scale")):
            found = [getattr(line, key) for line in own]
            values = np.array([item.value for item in found])
            spread = np.abs([[item.value - item.low for item in found], [item.high - item.value for item in found]])
            axes.errorbar(
                sizes, values, yerr=spread, color=_COLORS[place % len(_COLORS)], marker=_MARKERS[place % len(_MARKERS)],
                markersize=4.5, linewidth=1.1, elinewidth=0.8, capsize=2,
                linestyle="-" if name.split(":")[0] in OPTIMAL else "--", label=name,
            )  # fmt: skip
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _dress(left, "Noise of one group's gradient", "variance / squared signal")
    _dress(right, "Scale of the mean gradient (1: unbiased)", "along the unbiased reference")
    right.axhline(1.0, color=GREY, linewidth=0.8)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("trajectories in a group, N")
        ticks = sorted({line.group_size for line in lines})
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=7.5, frameon=False)
    return figure


def _energy(samples: Sequence[ProblemSample]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure = _figure(12.0, 3.9)
    first, second, third = figure.subplots(1, 3)
    sample = max(samples, key=lambda item: float(item.lengths.double().std()))
    shown = list(range(min(8, sample.size)))
    first.bar(shown, sample.trajectory_energy[shown].numpy(),
              color=[GREEN if sample.returns[row] > 0 else RED for row in shown])  # fmt: skip
    first.set_xlabel("trajectory of one problem (green: rewarded)")
    _dress(first, "Exact total energy", r"$\|\nabla \log \pi(\tau)\|^2$")
    for row in shown:
        values = sample.token_energy[row][sample.batch.response_mask[row]].cumsum(0).numpy()
        second.plot(range(1, len(values) + 1), values, color=_COLORS[row], linewidth=1.3)
    second.set_xlabel("model token k")
    _dress(second, "Realized energy, the same trajectories", r"$W_k = \sum_{j\leq k} w_j$")
    lengths = torch.cat([item.lengths for item in samples]).numpy()
    energy = torch.cat([item.trajectory_energy for item in samples]).numpy()
    right = torch.cat([item.returns for item in samples]).numpy() > 0
    for chosen, color, label in ((right, GREEN, "rewarded"), (~right, RED, "not rewarded")):
        third.scatter(lengths[chosen], energy[chosen], s=9, alpha=0.45, color=color, linewidths=0, label=label)
    third.set_yscale("log")
    third.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    third.set_xlabel("model tokens of the trajectory")
    _dress(third, "Exact energy against length", r"$\|\nabla \log \pi(\tau)\|^2$")
    third.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def _advantages(samples: Sequence[ProblemSample], choices: Sequence[Choice]) -> Figure | None:
    """One group of up to 8 with a right and a wrong trajectory, as long as can be had: the advantage of every token."""
    from matplotlib.ticker import MaxNLocator

    sample = max(samples, key=lambda item: int(item.lengths.max()))
    order = sample.lengths.argsort(descending=True, stable=True)
    right = [row for row in order.tolist() if sample.returns[row] > 0]
    wrong = [row for row in order.tolist() if sample.returns[row] <= 0]
    if not right or not wrong:
        return None
    others = [row for row in range(sample.size) if row not in (right[0], wrong[0])][:6]
    rows = torch.tensor([[right[0], wrong[0], *others]])
    figure = _figure(11.5, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for place, choice in enumerate(choices):
        (values,) = advantages_in([sample], Partition(rows=(rows,)), choice, drop_zero_variance=True)
        for panel, axes in enumerate(panels):
            own = values[0, panel][sample.batch.response_mask[rows[0, panel]]]
            axes.step(range(1, len(own) + 1), own.numpy(), where="mid", color=_COLORS[place % len(_COLORS)],
                      linewidth=1.2, linestyle="-" if choice.name in OPTIMAL else "--", label=choice.label)  # fmt: skip
    for axes, title in zip(panels, ("A rewarded trajectory", "One without reward, same group"), strict=True):
        _dress(axes, title, "advantage")
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_xlabel("model token k")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7.5, frameon=False)
    return figure


def _proxies(samples: Sequence[ProblemSample]) -> Figure:
    figure = _figure(12.0, 3.9)
    exact = torch.cat([item.trajectory_energy for item in samples]).numpy()
    correlations = energy_correlations(samples)
    titles = {"logit_proxy": "Logit-gradient proxy", "head_exact": "Head-exact, diagonal", "length": "Length"}
    axes_of = figure.subplots(1, len(titles))
    for axes, (name, parts) in zip(axes_of, proxy_energies(samples).items(), strict=True):
        axes.scatter(np.concatenate(parts), exact, s=9, alpha=0.45, color=BLUE, linewidths=0)
        found = correlations[name]
        said = f"Pearson {found['pearson']:.2f}, Spearman {found['spearman']:.2f}, within problems "
        said += f"{found['pearson_within_problems']:.2f}"
        axes.set_yscale("log")
        axes.set_xlabel(f"sum over the trajectory\n{said}", fontsize=8)
        _dress(axes, titles[name], r"exact $\|\nabla \log \pi(\tau)\|^2$")
    return figure


def _dress(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(label)
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=140, layout="constrained")


def _save(figure: Figure, path: Path) -> Path:
    atomic_write(path, lambda out: figure.savefig(out, format="png"))
    return path
