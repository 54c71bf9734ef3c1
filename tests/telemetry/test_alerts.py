from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.telemetry.alerts import (
    ALERT_NAMES,
    RULES,
    Alert,
    find_alerts,
    held_out_change,
    policy_is_worse,
    remove_repeated_alerts,
    reward_change,
    select_training_rows,
)
from agentrl.telemetry.machine import DISK_FREE, MEMORY_FREE
from agentrl.telemetry.records import Metrics
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings

GIB = 1024.0**3
HEALTHY: Metrics = {
    "policy/entropy": 0.5,
    "policy/updates": 1,
    "rollout/sampled_entropy": 0.5,
    "policy/gradient_norm": 0.1,
    "policy/engine_abs_diff": 1e-3,
    "policy/log_ppl_gap": 1e-3,
    "reward/mean": 0.5,
    "reward/stderr": 0.02,
    "reward/count": 64,
    "reward/problem_share": 0.2,
    "groups/issued": 8,
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
    "infrastructure": {"groups/infrastructure_failures": 20},
    "engine_difference": {"policy/engine_abs_diff": 0.02},
    "perplexity_gap": {"policy/log_ppl_gap": 0.2},
    "staleness": {"staleness/mean": 6.0},
    "reward_collapse": {"reward/mean": 0.1},
    "void_share": {"rollout/ended/answered": 10, "rollout/ended/void_turn": 54},
    "truncated_share": {"rollout/ended/answered": 20, "rollout/ended/token_limit": 44},
    "tool_failures": {"rollout/tool_outcome/ok": 10, "rollout/tool_outcome/error": 50},
    "never_correct": {"reward/mean": 0.0, "reward/stderr": 0.0},
    "constant_reward": {"reward/mean": 1.0, "reward/stderr": 0.0},
    "random_reward": {"reward/problem_share": 0.0},
    "entropy_collapse": {"rollout/sampled_entropy": 0.004},
    "gradient_spike": {"policy/gradient_norm": 2.0},
    "length_explosion": {"rollout/model_tokens_mean": 400},
    "no_signal": {"groups/trained": 0},
    "standstill": {},
    "disk": {DISK_FREE: 0.9 * GIB},
    "memory": {MEMORY_FREE: 0.04},
}
BEFORE = {"standstill": 95, "never_correct": 0, "random_reward": 0}  # healthy rows, where 30 are not the right number
DURING = {"random_reward": 40}  # failing rows, where more than 5 are needed
AT_ONCE = {"disk"}


def history(last: Metrics, *, healthy: int = 30, failing: int = 5) -> list[Metrics]:
    rows = [HEALTHY] * healthy + [HEALTHY | last] * failing
    return [row | {"step": step} for step, row in enumerate(rows, start=1)]


def test_every_alert_has_a_case_here() -> None:
    assert tuple(FAILING) == ALERT_NAMES


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_an_alert_fires_where_its_metric_fails_and_no_other_does(name: str) -> None:
    rows = history(FAILING[name], healthy=BEFORE.get(name, 30), failing=DURING.get(name, 5))
    assert [alert.alert for alert in find_alerts(rows)] == [name]


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_one_step_fires_nothing(name: str) -> None:
    found = find_alerts(history(FAILING[name], healthy=BEFORE.get(name, 30), failing=1))
    assert [alert.alert for alert in found] == ([name] if name in AT_ONCE else [])


def test_a_healthy_run_is_silent_from_its_first_row_on() -> None:
    rows = history({})
    assert all(find_alerts(rows[:count]) == [] for count in range(len(rows) + 1))


def test_rows_without_metrics_fire_nothing() -> None:
    assert find_alerts([{"step": step} for step in range(1, 40)]) == []


def messages(rows: list[Metrics]) -> dict[str, str]:
    return {
        alert.alert: alert.message for alert in find_alerts([row | {"step": step} for step, row in enumerate(rows, 1)])
    }


def test_a_disk_that_fills_is_an_alert_twenty_steps_before_it_is_full() -> None:
    def filling(steps: int) -> list[Metrics]:
        return [{DISK_FREE: (100.0 - 2 * step) * GIB} for step in range(steps + 1)]

    assert "disk" not in messages(filling(29))  # 42 GiB, 2 a step: 21 steps
    assert messages(filling(30)) == {"disk": "the disk of the run directory will be full in 20 steps (40.00 GiB left)"}
    assert messages([{DISK_FREE: (20.0 + step) * GIB} for step in range(40)]) == {}
    assert messages([{DISK_FREE: GIB}]) == {}
    assert messages([{DISK_FREE: GIB / 2}]) == {"disk": "the disk of the run directory has only 0.50 GiB left"}


def test_memory_is_an_alert_by_the_mean_of_five_steps() -> None:
    share = [0.5] * 3 + [0.01, 0.02, 0.06, 0.07, 0.08]  # the last five: 0.048
    assert messages([{MEMORY_FREE: value} for value in share]) == {
        "memory": "only 4.8% of the memory of rank 0's machine is free"
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


def scored(*rewards: tuple[float, float], **more: float) -> list[Metrics]:
    """Build rows with a mean reward and its standard error over 16 groups, with one update each."""
    rows = [{"reward/mean": mean, "reward/stderr": error} for mean, error in rewards]
    constants: Metrics = {"groups/issued": 16, "policy/updates": 1, "reward/count": 128, **more}
    return [constants | row | {"step": step} for step, row in enumerate(rows, 1)]


def test_a_policy_broken_by_its_first_update_is_a_collapse_at_step_3() -> None:
    rows = scored((0.41, 0.06), (0.0, 0.0), (0.0, 0.0))  # 0.41 / 0.06 = 6.8
    assert [alert.alert for alert in find_alerts(rows[:2])] == []
    (alert,) = find_alerts(rows)
    assert alert.alert == "reward_collapse"
    assert alert.message == (
        "the reward fell from 0.41 (step 1) to 0 (steps 2 to 3), by 6.8 standard errors, after 1 update; "
        "a fall this early is usually caused by a high optimizer.learning_rate"
    )
    assert alert.advice.startswith("lower optimizer.learning_rate")
    late = scored(*[(0.41, 0.06)] * 12, *[(0.0, 0.0)] * 5)
    assert messages(late)["reward_collapse"].endswith("after 12 updates")


@pytest.mark.parametrize(
    "rewards",
    [
        [(0.41, 0.06), (0.2, 0.06), (0.25, 0.06)],  # 0.185 / (0.06 * sqrt(1 + 1 / 2)) = 2.5
        [(0.4, 0.01), (0.3, 0.01), (0.3, 0.01)],  # 8.2 standard errors, but over half of the start
        [(1.0, 0.0), (0.4, 0.2), (0.5, 0.2)],  # equal by chance: 0.55 / (0.2 * sqrt(1 + 1 / 2)) = 2.2
    ],
)
def test_noise_is_no_collapse(rewards: list[tuple[float, float]]) -> None:
    assert messages(scored(*rewards)) == {}


def test_few_groups_are_not_compared() -> None:
    rewards = [(0.5, 0.05), (0.0, 0.0), (0.0, 0.0)]
    assert messages(scored(*rewards, **{"groups/issued": 7})) == {}
    assert "reward_collapse" in messages(scored(*rewards, **{"groups/issued": 8}))


def evaluated(step: int, score: float, margin: float) -> Metrics:
    return {"step": step, "eval/avg_at_k": score, "eval/low": score - margin, "eval/high": score + margin}


def test_the_held_out_score_is_compared_with_the_one_before_training() -> None:
    played = scored(*[(0.5, 0.05)] * 4)
    rows = [evaluated(0, 0.5, 0.0196), *played[:3], evaluated(3, 0.4, 0.0196), played[3]]
    trained = select_training_rows(rows)
    assert [(row["step"], row.get("eval/avg_at_k")) for row in trained] == [(1, 0.5), (2, None), (3, None), (4, 0.4)]
    assert messages(trained) == {  # errors of 0.01: 0.1 / (0.01 * sqrt(2))
        "reward_collapse": "the held-out score fell from 0.5 before training to 0.4, by 7.1 standard errors"
    }
    rows[4] = evaluated(3, 0.45, 0.0196)  # 3.5 standard errors: worse, but no collapse
    assert messages(select_training_rows(rows)) == {}
    change = held_out_change(rows)
    assert change == {"start": 0.5, "end": 0.45, "standard_errors": pytest.approx(-3.5355, abs=1e-4)}
    assert policy_is_worse(reward_change(rows), change)
    assert not policy_is_worse(reward_change(rows), None)
    assert not policy_is_worse(None, held_out_change([evaluated(0, 0.5, 0.0196), evaluated(3, 0.46, 0.0196)]))


def test_a_reward_that_fell_is_worse_where_nothing_is_held_out() -> None:
    change = reward_change(scored((0.4, 0.03), (0.4, 0.03), (0.1, 0.04), (0.1, 0.04)))
    assert change == {"start": 0.4, "end": pytest.approx(0.1), "standard_errors": pytest.approx(-0.3 / 0.04)}
    assert policy_is_worse(change, None)
    assert reward_change(scored((0.4, 0.03))) is None
    assert not policy_is_worse(None, None)
    assert policy_is_worse(reward_change(scored((1.0, 0.0), (0.0, 0.0))), None)
    assert not policy_is_worse(reward_change(scored((1.0, 0.0), (1.0, 0.0))), None)


def test_symptoms_of_a_collapse_stand_below_it_without_advice() -> None:
    collapsed = {"rollout/ended/void_turn": 120, "rollout/ended/answered": 8, "groups/trained": 0}
    rows = [row | (collapsed if row["step"] > 1 else {}) for row in scored((0.41, 0.06), *[(0.0, 0.0)] * 5)]
    found = find_alerts(rows)
    assert [alert.alert for alert in found] == ["reward_collapse", "void_share", "no_signal"]
    assert [bool(alert.advice) for alert in found] == [True, False, False]
    assert str(found[1]).endswith("ended with a void turn (follows from reward_collapse)")
    rows = [row | {"rollout/sampled_entropy": 0.5 if row["step"] == 1 else 0.001} for row in rows]
    assert "entropy_collapse" not in messages(rows)  # the first five steps are to be over


def test_alerts_of_a_whole_run_begin_with_the_cause() -> None:
    early = Alert(step=5, alert="void_share", message="m", advice="raise rollout.max_turn_tokens")
    again = Alert(step=8, alert="void_share", message="n", advice="a")
    cause = Alert(step=7, alert="reward_collapse", message="fell", advice="lower it")
    assert remove_repeated_alerts([early, cause, again]) == [
        cause,
        Alert(step=5, alert="void_share", message="m (follows from reward_collapse)", advice=""),
    ]
    assert remove_repeated_alerts([early]) == [early]


def test_a_collapsed_entropy_is_seen_in_steps_that_train_on_nothing() -> None:
    rows: list[Metrics] = [{"rollout/sampled_entropy": 0.4, "policy/entropy": 0.4}] * 5
    rows += [{"rollout/sampled_entropy": 0.001}] * 5
    assert messages(rows) == {"entropy_collapse": "entropy fell from 0.4 to 0.001 nats per token"}


@pytest.mark.parametrize(("reward", "fires"), [(0.97, False), (0.6, True)])
def test_a_policy_that_solves_nearly_everything_may_be_certain(reward: float, fires: bool) -> None:
    rows: list[Metrics] = [{"rollout/sampled_entropy": 0.4, "reward/mean": 0.25}] * 5
    rows += [{"rollout/sampled_entropy": 0.008, "reward/mean": reward}] * 5
    assert ("entropy_collapse" in messages(rows)) is fires


def test_a_reward_of_one_and_a_reward_of_zero_are_told_apart() -> None:
    assert messages(scored(*[(1.0, 0.0)] * 5)) == {
        "constant_reward": "every rollout since the first step has the reward 1"
    }
    assert messages(scored(*[(0.0, 0.0)] * 3)) == {
        "never_correct": "no rollout of steps 1 to 3 was correct: all have the reward 0"
    }
    # Right answers without a reward: it is the reward that is wrong.
    assert messages(scored(*[(0.0, 0.0)] * 5, **{"rollout/verdict/correct": 30})) == {
        "constant_reward": "every rollout since the first step has the reward 0"
    }
    assert messages(scored(*[(0.0, 0.0)] * 2)) == {}
    assert messages(scored((0.1, 0.05), *[(0.0, 0.0)] * 5)) == {}  # rare successes


def test_a_reward_is_random_where_neither_problem_nor_training_matter() -> None:
    def rows(share: float, gain: float) -> list[Metrics]:
        noise = [0.04 * (-1) ** step for step in range(40)]
        return [
            {"reward/mean": 0.5 + one + gain * (step >= 20), "reward/problem_share": share + one}
            for step, one in enumerate(noise)
        ]

    # Standard errors: 0.04 / sqrt(39) = 0.0064 of the share, 0.013 of the reward's change.
    assert messages(rows(0.036, 0.0)) == {
        "random_reward": "the reward appears to be random: 4% of its variance is between problems, and training "
        "does not change it (0.5 in the first steps, 0.5 now)"
    }
    assert messages(rows(0.038, 0.0)) == messages(rows(0.0, 0.04)) == messages(rows(0.0, 0.0)[:39]) == {}


def test_an_alert_has_its_cause_and_advice() -> None:
    (alert,) = find_alerts(history(FAILING["length_explosion"]))
    assert (alert.step, alert.message) == (35, "rollouts grew from 100 to 400 model tokens")
    assert "reward.overlong_buffer" in alert.advice


def test_stop_on_takes_names_of_alerts() -> None:
    assert TelemetrySettings(stop_on=("no_signal",)).stop_on == ("no_signal",)
    with pytest.raises(ValueError, match="unknown alert 'entropi'; valid: infrastructure, "):
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
    page = (Path(__file__).parents[2] / "docs/reference/telemetry.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.when} | {rule.advice} |" in page
