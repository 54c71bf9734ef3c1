"""Alerts in a run that was made to fail: groups of one have no signal."""

from __future__ import annotations

from pathlib import Path

import pytest
from telemetry.traces import check_nested, read_trace
from training.conftest import CommandLine

from agentrl.telemetry.run_directory import RunDirectory

pytestmark = pytest.mark.slow


def test_an_alert_is_shown_recorded_and_stops_the_run(command_line: CommandLine, random_policy: Path) -> None:
    failing = [
        "telemetry.trackers=[tensorboard]",
        "telemetry.trace=true",
        "rollout.group_size=1",
        "algorithm.drop_zero_variance=true",
        "training.steps=9",
        "data.eval=[]",
    ]
    said = command_line.run(
        *command_line.counting(random_policy, *failing, "name=failing", "telemetry.stop_on=[no_signal]"), code=130
    )
    assert "alert no_signal at step 5: no group had a training signal in the last 5 steps. Try: mix in" in said
    assert said.count("warning: alert no_signal at step 5") == 2  # as it begins, and at the end
    assert "stopped after step 5; checkpoint saved" in said
    run = RunDirectory(command_line.folder / "runs" / "failing")
    assert list(run.trackers.parent.glob("events.out.tfevents.*"))
    assert [(alert.step, alert.alert) for alert in run.alerts()] == [(5, "no_signal")]
    check_trace(run)


def check_trace(run: RunDirectory) -> None:
    """Slices lie within each other; every stored trajectory has one, around its turns; rank 0 has the steps."""
    lanes = read_trace(run.trace)
    check_nested(lanes)
    rows = [slice for (group, _), slices in lanes.items() if group == "trajectories" for slice in slices]
    played = {tuple(row["args"].values())[2:] for row in rows if "ended" in row.get("args", {})}
    steps = run.steps_with_trajectories()
    assert steps == [1, 2, 3, 4, 5]
    stored = {(row["step"], row["group"], row["sample"]) for step in steps for row in run.read_trajectories(step)}
    assert played == stored
    assert {"turn", "environment", "start", "wait for admission"} <= {row["name"] for row in rows}
    rank = [row["name"] for row in lanes["rank 0", "1"]]
    assert [rank.count(name) for name in ("step", "wait for rollouts", "train", "send weights")] == [6, 6, 5, 5]
    # The sixth step was stopped while it waited.
