from __future__ import annotations

import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from agentrl.telemetry.plots import (
    PANELS,
    add_legend_below,
    draw_plots,
    extract_metric_series,
    new_figure,
    running_mean,
)


def steps(count: int) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "reward/mean": 0.2 + 0.01 * step,
            "reward/stderr": 0.03,
            "policy/entropy": 1.0,
            "policy/gradient_norm": 0.5,
            "policy/kl_engine_k3": 0.0 if step == 1 else 1e-12,
            "policy/engine_abs_diff": 1e-7,
            "variance/total_power": 0.2,
            "variance/signal_strength": 0.01,
            "variance/pure_noise": -0.002,
            "variance/head_exact_total_power": 0.1,
            "variance/head_exact_signal_strength": 0.1,
            "variance/head_exact_pure_noise": -0.001,
            "rollout/turns_mean": 2.0,
            "rollout/tool_calls_mean": 1.5,
            "rollout/response_tokens_mean": 40.0,
            "rollout/model_tokens_mean": 30.0,
            "rollout/ended/answered": 10,
            "rollout/ended/void_turn": 2,
        }
        for step in range(1, count + 1)
    ]


EVALUATIONS = [
    {
        "step": step,
        "eval/avg_at_k": mean,
        "eval/low": mean - 0.1,
        "eval/high": mean + 0.1,
        "eval/k": 8,
        "eval/problems": 32,
        "eval/family/a": mean,
    }
    for step, mean in ((0, 0.3), (40, 0.8))
]


def size(file: Path) -> tuple[int, int]:
    header = file.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", header[16:24])


def test_every_panel_and_the_overview_are_drawn(tmp_path: Path) -> None:
    files = draw_plots([EVALUATIONS[0], *steps(40), EVALUATIONS[1]], tmp_path / "plots", "a run")
    assert [file.name for file in files] == [*(panel.file for panel in PANELS), "overview.png"]
    assert size(files[0]) == (896, 560)
    assert size(files[-1]) == (2100, 1512)


def test_lines_of_a_panel_differ_in_colour_and_dashes_and_the_legend_covers_none() -> None:
    (variance,) = (panel for panel in PANELS if panel.file == "variance.png")
    figure = new_figure(6.4, 4.0)
    axes = figure.add_subplot()
    assert variance.draw(axes, steps(3))
    add_legend_below(axes)
    lines = axes.get_lines()
    assert len({line.get_color() for line in lines}) == len(lines) == 6
    assert [line.get_linestyle() for line in lines] == ["-", "--", "--", "--", "-", "--"]  # "--": any dashes
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    label = axes.xaxis.get_label().get_window_extent()
    assert legend.get_window_extent().y1 <= min(axes.get_window_extent().y0, label.y0)
    assert legend.get_window_extent().y0 >= 0


def test_pictures_say_which_run_they_show_and_what_their_intervals_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}

    def kept(figure: Figure, path: Path) -> Path:
        told[path.name] = " ".join(item.get_text() for item in figure.findobj(Text))
        return path

    monkeypatch.setattr("agentrl.telemetry.plots.save_figure", kept)
    rows = [EVALUATIONS[0], *steps(40), EVALUATIONS[1]]
    draw_plots(rows, Path(), "first, seed 7: 4 problems x 8 rollouts a step")
    assert all("first, seed 7: 4 problems x 8 rollouts a step" in text for text in told.values())
    assert len(told) == len(PANELS) + 1
    for name in ("avg_at_k.png", "overview.png"):
        assert "all 32 problems, 95 % interval" in told[name]
    assert "one run, bands and bars are 95 % intervals" in told["overview.png"]


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    files = draw_plots([{"step": 1, "policy/entropy": 0.7}], tmp_path, "a run")
    assert [file.name for file in files] == ["entropy.png", "overview.png"]
    assert draw_plots([], tmp_path / "none", "a run") == []
    assert draw_plots([{"step": 1, "unknown": 3}], tmp_path / "none", "a run") == []


def test_figures_without_anything_above_zero_are_drawn_too(tmp_path: Path) -> None:
    rows = [{"step": step, "policy/kl_engine_k3": 0.0} for step in (1, 2)]
    assert [file.name for file in draw_plots(rows, tmp_path, "a run")] == ["engine_policy.png", "overview.png"]


def test_series_and_running_mean() -> None:
    rows = [{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": 0.0}]
    assert extract_metric_series(rows, "a") == ([1, 4], [2.0, 0.0])
    assert running_mean([1.0, 3.0, 8.0, 1.0], window=3) == [2.0, 4.0, 4.0, 4.5]
    assert running_mean([], window=3) == []


def test_an_interval_that_misses_its_mean_by_rounding_is_drawn(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "eval/avg_at_k": 0.0, "eval/low": 7e-18, "eval/high": 0.1},
        {"step": 2, "eval/avg_at_k": 1.0, "eval/low": 0.9, "eval/high": 1.0 - 1e-16},
    ]
    assert [file.name for file in draw_plots(rows, tmp_path, "a run")] == ["avg_at_k.png", "overview.png"]
