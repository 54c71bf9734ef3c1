from __future__ import annotations

import struct
from pathlib import Path

from agentrl.telemetry.plots import PANELS, draw_plots, running_mean, series


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
        "eval/family/a": mean,
    }
    for step, mean in ((0, 0.3), (40, 0.8))
]


def size(file: Path) -> tuple[int, int]:
    header = file.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", header[16:24])


def test_every_panel_and_the_overview_are_drawn(tmp_path: Path) -> None:
    files = draw_plots([EVALUATIONS[0], *steps(40), EVALUATIONS[1]], tmp_path / "plots")
    assert [file.name for file in files] == [*(panel.file for panel in PANELS), "overview.png", "overview-dark.png"]
    assert size(files[0]) == (896, 560)
    assert size(files[-2]) == (2100, 1428)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    files = draw_plots([{"step": 1, "policy/entropy": 0.7}], tmp_path)
    assert [file.name for file in files] == ["entropy.png", "overview.png", "overview-dark.png"]
    assert draw_plots([], tmp_path / "none") == []
    assert draw_plots([{"step": 1, "unknown": 3}], tmp_path / "none") == []


def test_figures_without_anything_above_zero_are_drawn_too(tmp_path: Path) -> None:
    rows = [{"step": step, "policy/kl_engine_k3": 0.0} for step in (1, 2)]
    assert [file.name for file in draw_plots(rows, tmp_path)] == [
        "engine_policy.png",
        "overview.png",
        "overview-dark.png",
    ]


def test_series_and_running_mean() -> None:
    rows = [{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": 0.0}]
    assert series(rows, "a") == ([1, 4], [2.0, 0.0])
    assert running_mean([1.0, 3.0, 8.0, 1.0], window=3) == [2.0, 4.0, 4.0, 4.5]
    assert running_mean([], window=3) == []


def test_an_interval_that_misses_its_mean_by_rounding_is_drawn(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "eval/avg_at_k": 0.0, "eval/low": 7e-18, "eval/high": 0.1},
        {"step": 2, "eval/avg_at_k": 1.0, "eval/low": 0.9, "eval/high": 1.0 - 1e-16},
    ]
    assert [file.name for file in draw_plots(rows, tmp_path)] == ["avg_at_k.png", "overview.png", "overview-dark.png"]
