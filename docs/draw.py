"""Draw the pictures of docs/concepts into docs/images: ``python docs/draw.py``.

The baselines of the fourth picture are computed by `agentrl.algorithms.compute_advantages`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from agentrl.algorithms import AdvantageInputs, compute_advantages

IMAGES = Path(__file__).parent / "images"
BLUE, GREY, RED, GREEN = "#c7d7f5", "#e6e6e6", "#f6cfc8", "#cfe8d0"
STYLE = {"font.size": 9, "font.family": "sans-serif", "svg.fonttype": "path", "svg.hashsalt": "agentrl"}


def main(folder: Path = IMAGES) -> None:
    """Draw every picture as ``folder/NAME.svg``."""
    with pyplot.rc_context(STYLE):
        for draw in (tokens, exclusion, schedules, baselines, sandbox):
            draw()
            pyplot.savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None}, bbox_inches="tight")
            pyplot.close()


def canvas(width: float, height: float) -> Axes:
    """Return an empty drawing area whose units are hundredths of an inch."""
    figure = pyplot.figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, left: float, bottom: float, width: float, height: float, text: str, colour: str) -> None:
    """Draw a rounded box with a text in its middle."""
    shape = FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=6", fc=colour, ec="#555")
    axes.add_patch(shape)
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """Draw an arrow with a text above its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#333"})
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 4, text, ha="center", va="bottom", fontsize=8)


def tokens() -> None:
    """Draw one trajectory: prompt, two turns and the observation between them."""
    axes = canvas(790, 190)
    parts = (  # name, text, width, colour, mask, log-probabilities
        ("P", "Solve with Python. ...", 155, GREY, "0  0  0  0", "–"),
        ("A0", "key((81+209)//2)  <end>", 175, BLUE, "1  1  1  1  1", "from the engine"),
        ("E0", "Code execution result: more 145", 225, GREY, "0  0  0  0  0", "–"),
        ("A1", "152  <end>", 115, BLUE, "1  1  1", "from the engine"),
    )
    left = 110.0
    for name, text, width, colour, mask, log_probs in parts:
        box(axes, left, 110, width - 6, 40, text, colour)
        axes.text(left + width / 2, 166, name, ha="center", weight="bold")
        axes.text(left + width / 2, 82, mask, ha="center")
        axes.text(left + width / 2, 56, log_probs, ha="center")
        left += width
    for height, text in ((130, "token ids"), (85, "response mask"), (59, "log-probabilities")):
        axes.text(0, height, text, va="center")
    axes.text(110, 20, "Grey: prompt and observation, encoded once. Blue: sampled ids, kept as they are and trained.")


def exclusion() -> None:
    """Draw which statistics a rollout enters, by the way it ended."""
    axes = canvas(720, 250)
    rows = (
        ("answered, stopped", "loss, baseline, averages", BLUE),
        ("turn_limit, token_limit, deadline", "algorithm.truncated: train", BLUE),
        ("void_turn", "algorithm.void_turns: exclude", GREY),
        ("cancelled, infrastructure_failure", "counted, and nothing else", RED),
    )
    box(axes, 0, 100, 110, 50, "a rollout\nends", "white")
    for number, (ended, effect, colour) in enumerate(rows):
        bottom = 200.0 - 62 * number
        box(axes, 180, bottom, 240, 40, ended, "white")
        box(axes, 490, bottom, 220, 40, effect, colour)
        arrow(axes, (110, 125), (180, bottom + 20))
        arrow(axes, (420, bottom + 20), (490, bottom + 20))


def schedules() -> None:
    """Draw when rollouts and training run under each schedule."""
    axes = canvas(720, 230)
    plans = {
        "synchronous": ([(0, 120), (180, 120), (360, 120)], [(120, 60), (300, 60), (480, 60)]),
        "overlapped": ([(0, 120), (120, 120), (240, 120), (360, 120)], [(120, 60), (240, 60), (360, 60), (480, 60)]),
        "asynchronous": ([(0, 540)], [(100, 60), (190, 60), (280, 60), (370, 60), (460, 60)]),
    }
    for number, (name, (rollouts, trainings)) in enumerate(plans.items()):
        bottom = 165.0 - 75 * number
        axes.text(0, bottom + 20, name, va="center")
        for start, length in rollouts:
            text = f"rollouts {start // 120}" if name == "overlapped" else "rollouts"
            box(axes, 110 + start, bottom + 22, length - 3, 22, text, BLUE)
        for start, length in trainings:
            text = f"train {start // 120 - 1}" if name == "overlapped" else "train"
            box(axes, 110 + start, bottom, length - 3, 20, text, GREEN)
    arrow(axes, (110, 4), (700, 4))
    axes.text(60, 4, "time", va="center")


def baselines() -> None:
    """Draw the baselines of four rollouts under three estimators, and the energies that make the baselines differ."""
    length, wrong = 24, {2: 9, 3: 14}  # two of four rollouts go wrong at one token
    energy = torch.full((4, length), 0.01)
    for row, index in wrong.items():
        energy[row, index] = 1.0
    rewards = torch.zeros(4, length)
    rewards[:2, -1] = 1.0
    mask = torch.ones(4, length, dtype=torch.bool)
    groups = torch.zeros(4, dtype=torch.long)
    inputs = AdvantageInputs(rewards=rewards, response_mask=mask, groups=groups, token_energy=energy)
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7.2, 4), sharex=True, height_ratios=(1, 1.4))
    top.imshow(energy.numpy(), aspect="auto", cmap="Blues")
    top.set_yticks(range(4), ["reward 1", "reward 1", "reward 0", "reward 0"])
    top.set_title("Energy of each token: the failures concentrate theirs at the token that goes wrong", fontsize=9)
    for name, line in (("rloo", ":"), ("ogb", "--"), ("tir_otb", "-")):
        computed = compute_advantages(name, inputs)
        bottom.plot(computed.baselines[2].tolist(), line, label=name, color="#1f4e9c", drawstyle="steps-mid")
    bottom.set(xlabel="model token k", ylabel="baseline of the third rollout", ylim=(-0.05, 0.75))
    bottom.legend(loc="center right")
    figure.tight_layout()


def sandbox() -> None:
    """Draw the layers between a program and the host."""
    axes = canvas(720, 250)
    box(axes, 0, 0, 710, 240, "", "white")
    axes.text(12, 222, "host: trainer, data, network", va="center")
    box(axes, 14, 14, 180, 170, "server\n\nwarm interpreters;\nnever see a program's\ntext or output", GREY)
    box(axes, 300, 14, 396, 190, "", "#fbf3da")
    axes.text(310, 190, "namespaces: processes, mounts, network, users", va="center")
    box(axes, 316, 26, 364, 148, "", "#f6e3b4")
    axes.text(326, 160, "Landlock: files, TCP, signals", va="center")
    box(axes, 332, 38, 332, 106, "", "#efd08a")
    axes.text(342, 130, "seccomp: system calls  ·  limits: memory, processes, time", va="center", fontsize=8)
    box(axes, 350, 50, 296, 60, "program of the model", RED)
    arrow(axes, (194, 120), (350, 92), "")
    axes.text(245, 124, "fork", ha="center")
    arrow(axes, (350, 66), (194, 60), "")
    axes.text(245, 42, "output,\nwait status", ha="center", va="center", fontsize=8)


if __name__ == "__main__":
    main()
