from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.telemetry.alerts import NAMES, RULES, Alert, alerts
from agentrl.telemetry.machine import DISK_FREE, MEMORY_FREE
from agentrl.telemetry.records import Metrics
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings

GIB = 1024.0**3
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
    DISK_FREE: 50 * GIB,
    MEMORY_FREE: 0.5,
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
    "standstill": {},
    "disk": {DISK_FREE: 0.9 * GIB},
    "memory": {MEMORY_FREE: 0.04},
}
BEFORE = {"standstill": 95}  # healthy rows, where more than 30 are needed
AT_ONCE = {"disk"}


def history(last: Metrics, *, healthy: int = 30, failing: int = 5) -> list[Metrics]:
    rows = [HEALTHY] * healthy + [HEALTHY | last] * failing
    return [row | {"step": step} for step, row in enumerate(rows, start=1)]


def test_every_alert_has_a_case_here() -> None:
    assert tuple(FAILING) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_fires_where_its_metric_fails_and_no_other_does(name: str) -> None:
    assert [alert.alert for alert in alerts(history(FAILING[name], healthy=BEFORE.get(name, 30)))] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_one_step_fires_nothing(name: str) -> None:
    found = alerts(history(FAILING[name], healthy=BEFORE.get(name, 30), failing=1))
    assert [alert.alert for alert in found] == ([name] if name in AT_ONCE else [])


def test_a_healthy_run_is_silent_from_its_first_row_on() -> None:
    rows = history({})
    assert all(alerts(rows[:count]) == [] for count in range(len(rows) + 1))


def test_rows_without_metrics_fire_nothing() -> None:
    assert alerts([{"step": step} for step in range(1, 40)]) == []


def messages(rows: list[Metrics]) -> dict[str, str]:
    return {alert.alert: alert.message for alert in alerts([row | {"step": step} for step, row in enumerate(rows, 1)])}


def test_a_disk_that_fills_is_an_alert_twenty_steps_before_it_is_full() -> None:
    def filling(steps: int) -> list[Metrics]:
        return [{DISK_FREE: (100.0 - 2 * step) * GIB} for step in range(steps + 1)]

    assert "disk" not in messages(filling(29))  # 42 GiB, 2 a step: 21 steps
    assert messages(filling(30)) == {"disk": "the disk of the run directory is full in 20 steps (40.00 GiB left)"}
    assert messages([{DISK_FREE: (20.0 + step) * GIB} for step in range(40)]) == {}
    assert messages([{DISK_FREE: GIB}]) == {}
    assert messages([{DISK_FREE: GIB / 2}]) == {"disk": "the disk of the run directory has 0.50 GiB left"}


def test_memory_is_an_alert_by_the_mean_of_five_steps() -> None:
    share = [0.5] * 3 + [0.01, 0.02, 0.06, 0.07, 0.08]  # the last five: 0.048
    assert messages([{MEMORY_FREE: value} for value in share]) == {
        "memory": "4.8% of the memory of rank 0's machine is free"
    }
    assert messages([{MEMORY_FREE: value} for value in [*share[:-1], 0.09]]) == {}


def test_standstill_needs_reward_and_entropy_to_stay() -> None:
    noise = [0.1 * (-1) ** step for step in range(100)]  # of 20 values: mean 0, variance 0.01 * 20 / 19

    def rows(reward: float, entropy: float) -> list[Metrics]:
        changed = [step >= 80 for step in range(100)]
        pairs = zip(noise, changed, strict=True)
        return [
            {"reward/mean": 1 + one + reward * late, "policy/entropy": 1 + one + entropy * late} for one, late in pairs
        ]

    error = (2 * (0.01 * 20 / 19) / 20) ** 0.5
    assert "standstill" in messages(rows(2.4 * error, -2.4 * error))
    assert messages(rows(2.6 * error, 0.0)) == {}
    assert messages(rows(0.0, -2.6 * error)) == {}
    assert messages(rows(0.0, 0.0)[:99]) == {}


def test_an_alert_has_its_cause_and_advice() -> None:
    (alert,) = alerts(history(FAILING["length_explosion"]))
    assert (alert.step, alert.message) == (35, "rollouts grew from 100 to 400 model tokens")
    assert "reward.overlong_buffer" in alert.advice


def test_stop_on_takes_names_of_alerts() -> None:
    assert TelemetrySettings(stop_on=("no_signal",)).stop_on == ("no_signal",)
    with pytest.raises(ValueError, match="there is no alert 'entropi'; alerts: entropy_collapse, "):
        TelemetrySettings(stop_on=("entropi",))


def test_a_resumed_run_keeps_the_alerts_up_to_its_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", "name: x\n")
    for step in (2, 5):
        run.append_alert(Alert(step=step, alert="staleness", message="m", advice="a"))
    with run.alerts_file.open("ab") as torn:
        torn.write(b'{"step"')
    assert [alert.step for alert in run.alerts()] == [2, 5]
    run.truncate_after(3, rows=0)
    assert [alert.step for alert in run.alerts()] == [2]


def test_the_page_lists_every_alert_with_its_threshold_and_advice() -> None:
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.fires} | {rule.advice} |" in page
