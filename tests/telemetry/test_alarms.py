from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.telemetry.alarms import ALARMS, NAMES, Ring, ringing
from agentrl.telemetry.records import Metrics
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings

HEALTHY: Metrics = {
    "policy/entropy": 0.5,
    "policy/gradient_norm": 0.1,
    "policy/engine_abs_diff": 1e-3,
    "policy/log_ppl_gap": 1e-3,
    "reward/mean": 0.5,
    "reward/stderr": 0.02,
    "reward/count": 64,
    "rollout/ended/answered": 60,
    "rollout/ended/void_turn": 4,
    "rollout/tool_outcome/ok": 50,
    "rollout/tool_outcome/error": 10,
    "rollout/model_tokens_mean": 100,
    "groups/trained": 8,
    "groups/infrastructure_failures": 0,
    "staleness/mean": 0.0,
}
FAILING: dict[str, Metrics] = {
    "entropy_collapse": {"policy/entropy": 0.004},
    "reward_collapse": {"reward/mean": 0.1},
    "gradient_spike": {"policy/gradient_norm": 2.0},
    "engine_difference": {"policy/engine_abs_diff": 0.02},
    "perplexity_gap": {"policy/log_ppl_gap": 0.2},
    "void_share": {"rollout/ended/answered": 10, "rollout/ended/void_turn": 54},
    "truncated_share": {"rollout/ended/answered": 20, "rollout/ended/token_limit": 44},
    "tool_failures": {"rollout/tool_outcome/ok": 10, "rollout/tool_outcome/error": 50},
    "no_signal": {"groups/trained": 0},
    "length_explosion": {"rollout/model_tokens_mean": 400},
    "staleness": {"staleness/mean": 6.0},
    "infrastructure": {"groups/infrastructure_failures": 20},
}


def history(last: Metrics, *, healthy: int = 30, failing: int = 5) -> list[Metrics]:
    rows = [HEALTHY] * healthy + [HEALTHY | last] * failing
    return [row | {"step": step} for step, row in enumerate(rows, start=1)]


def test_every_alarm_has_a_case_here() -> None:
    assert tuple(FAILING) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_alarm_rings_where_its_metric_fails_and_no_other_does(name: str) -> None:
    assert [ring.alarm for ring in ringing(history(FAILING[name]))] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_one_step_rings_nothing(name: str) -> None:
    assert ringing(history(FAILING[name], failing=1)) == []


def test_a_healthy_run_is_silent_from_its_first_row_on() -> None:
    rows = history({})
    assert all(ringing(rows[:count]) == [] for count in range(len(rows) + 1))


def test_rows_without_metrics_ring_nothing() -> None:
    assert ringing([{"step": step} for step in range(1, 40)]) == []


def test_a_ring_says_what_it_saw_and_what_to_try() -> None:
    (ring,) = ringing(history(FAILING["length_explosion"]))
    assert (ring.step, ring.message) == (35, "rollouts grew from 100 to 400 model tokens")
    assert "reward.overlong_buffer" in ring.advice


def test_stop_on_takes_names_of_alarms() -> None:
    assert TelemetrySettings(stop_on=("no_signal",)).stop_on == ("no_signal",)
    with pytest.raises(ValueError, match="there is no alarm 'entropi'; alarms: entropy_collapse, "):
        TelemetrySettings(stop_on=("entropi",))


def test_a_resumed_run_keeps_the_alarms_up_to_its_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", "name: x\n")
    for step in (2, 5):
        run.append_alarm(Ring(step=step, alarm="staleness", message="m", advice="a"))
    with run.alarms.open("ab") as torn:
        torn.write(b'{"step"')
    assert [ring.step for ring in run.rung()] == [2, 5]
    run.truncate_after(3, rows=0)
    assert [ring.step for ring in run.rung()] == [2]


def test_the_page_lists_every_alarm_with_its_threshold_and_advice() -> None:
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    for alarm in ALARMS:
        assert f"| `{alarm.name}` | {alarm.rings} | {alarm.advice} |" in page
