"""Alarms in a run that was made to fail: groups of one have no signal."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.conftest import CommandLine

from agentrl.telemetry.run_directory import RunDirectory

pytestmark = pytest.mark.slow


def test_an_alarm_is_said_recorded_and_stops_the_run(command_line: CommandLine, random_policy: Path) -> None:
    failing = [
        "telemetry.trackers=[tensorboard]",
        "rollout.group_size=1",
        "algorithm.drop_zero_variance=true",
        "training.steps=9",
        "data.eval=[]",
    ]
    said = command_line.run(
        *command_line.counting(random_policy, *failing, "name=failing", "telemetry.stop_on=[no_signal]"), code=130
    )
    assert "alarm no_signal at step 5: no group had a signal to train on for 5 steps. Try: mix in" in said
    assert "stopped after step 5; checkpoint saved" in said
    run = RunDirectory(command_line.folder / "runs" / "failing")
    assert list((run.trackers / "tensorboard").glob("events.out.tfevents.*"))
    assert [(ring.step, ring.alarm) for ring in run.rung()] == [(5, "no_signal")]
