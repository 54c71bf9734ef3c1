from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.telemetry.alerts import MACHINE_METRICS, RULES
from agentrl.telemetry.console import format_step
from agentrl.telemetry.metrics import (
    METRICS,
    SECTIONS,
    USER_METRICS,
    compute_user_metrics,
    find_metric,
    register_metric,
)
from agentrl.telemetry.plots import draw_plots
from agentrl.training.step.diagnostics import FIDELITY_FLOORS
from agentrl.weights.verify import NOISE_LIMITS

ROOT = Path(__file__).parents[2]
CODE = {
    file: file.read_text(encoding="utf-8")
    for file in (ROOT / "agentrl").rglob("*.py")
    if file.name != "catalogue.py" and "telemetry" not in file.parts
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Remove the metrics that a test registers."""
    yield
    USER_METRICS._entries.clear()


def test_names_are_unique_and_every_metric_says_what_it_is() -> None:
    assert len(METRICS) == sum(map(len, SECTIONS.values()))
    assert [metric.name for metric in METRICS.values() if not metric.meaning.endswith(".")] == []


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_measured_somewhere(name: str) -> None:
    """The last word of a metric's or a family's name occurs in the code that computes it."""
    word = re.sub(r"/?_?\{\w+\}$", "", name).rpartition("/")[2]
    assert any(re.search(rf"\b_?{word}\b|{word}_", text) for text in CODE.values()), name


def test_a_key_belongs_to_one_metric() -> None:
    assert find_metric("rollout/ended/token_limit") is METRICS["rollout/ended/{ending}"]
    assert find_metric("gateway/miss_tools") is METRICS["gateway/miss_{cause}"]
    assert find_metric("eval_falsified/avg_at_k") is METRICS["eval_falsified/{figure}"]
    assert find_metric("rollout/ended/") is None
    assert find_metric("reward/means") is None


def test_what_others_read_is_in_the_catalogue() -> None:
    assert {name for rule in RULES for name in rule.metrics} <= {*METRICS, *MACHINE_METRICS}
    panels = (ROOT / "agentrl" / "viewer" / "static" / "run.js").read_text(encoding="utf-8")
    shown = re.findall(r'"([a-z_]+/\w+)"', panels)
    assert [name for name in shown if find_metric(name) is None] == []
    assert len(shown) > 15


def test_a_metric_of_a_plug_in_is_measured_shown_and_drawn(tmp_path: Path) -> None:
    @register_metric("own/length", unit="calls", meaning="Calls of a trajectory.", console="calls {:.1f}")
    def length(trajectories: list[SimpleNamespace]) -> float:
        return sum(one.calls for one in trajectories) / len(trajectories)

    @register_metric("own/nothing", unit="", meaning="Nothing.")
    def nothing(trajectories: list[SimpleNamespace]) -> None:
        return None

    row = compute_user_metrics([SimpleNamespace(calls=1), SimpleNamespace(calls=2)], {})
    assert row == {"own/length": 1.5}
    assert format_step({"policy/entropy": 0.5, **row}, None) == "entropy 0.500  calls 1.5"
    files = draw_plots([{"step": 1, **row}], tmp_path, "a run")
    assert [file.name for file in files] == ["own_length.png", "overview.png"]
    assert find_metric("own/length").unit == "calls"  # type: ignore[union-attr]


def test_a_metric_that_fails_is_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    register_metric("bad/raises", unit="", meaning="Raises.")(lambda rows: 1 / 0)
    register_metric("bad/infinite", unit="", meaning="No number.")(lambda rows: float("inf"))
    register_metric("bad/taken", unit="", meaning="Another one's name.")(lambda rows: 1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert compute_user_metrics([], {"bad/taken"}) == {}
    said = [record.message for record in caplog.records]
    assert len(said) == 3
    assert "'bad/raises' failed; its value is omitted from this row" in " ".join(said)
    assert "failures are not logged: ZeroDivisionError: division by zero" in " ".join(said)
    assert "the value must be finite; got inf" in " ".join(said)


@pytest.mark.parametrize(
    ("name", "console", "problem"),
    [
        ("length", "", "the name must contain a group and a slash"),
        ("own/length", "{:.1f} {}", "cannot format a number"),
        ("own/length", "calls", "displays no number"),
    ],
)
def test_a_wrong_registration_says_what_is_wrong(name: str, console: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        register_metric(name, unit="", meaning="", console=console)


def test_the_example_of_the_page_runs() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "metrics.md", "exec"), {})
    rows = [SimpleNamespace(ended="answered", tool_calls=(1, 2)), SimpleNamespace(ended="void_turn", tool_calls=())]
    assert compute_user_metrics(rows, {}) == {"search/calls_mean": 2.0}


def test_the_bounds_of_the_difference_between_engine_and_trainer_are_those_of_the_check() -> None:
    metric = find_metric("policy/engine_abs_diff")
    assert metric is not None
    for dtype, floor in FIDELITY_FLOORS.items():
        assert f"{floor:g} to {NOISE_LIMITS[dtype]:g} ({dtype})" in metric.meaning
