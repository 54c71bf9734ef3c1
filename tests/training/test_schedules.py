"""Rollouts beside training, through the command line: on time, every group once, whole after an interruption."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import free_port
from shared import command_of

from agentrl.telemetry.run_directory import RunDirectory

from .conftest import DEADLINE, CommandLine, wait_until

pytestmark = pytest.mark.slow

SLOW = ["environment.kwargs.seconds=0.05", "rollout.concurrency=4", "training.steps=5", "evaluation.every=0"]
WEIGHTED = ["correction.weights=token", "telemetry.trajectories_every=1", "checkpoint.every=1"]


def groups_trained(run: Path) -> dict[int, list[int]]:
    """The groups of each step, as its file of trajectories has them."""
    directory = RunDirectory.resume(run)
    steps = directory.steps_with_trajectories()
    found = {step: sorted({row["group"] for row in directory.read_trajectories(step)}) for step in steps}
    directory.close()
    return found


def trained_rows(command_line: CommandLine, name: str) -> list[dict[str, Any]]:
    return [row for row in command_line.metrics(name) if "policy/updates" in row]


def assert_on_time(command_line: CommandLine, name: str, bound: int) -> None:
    """Steps 1 to 5 are trained, on stale tokens too, none older than ``bound`` steps."""
    rows = trained_rows(command_line, name)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert 1 <= max(row["staleness/max"] for row in rows) <= bound
    assert all(row["policy/updates"] == 1 for row in rows)
    differences = [row["policy/engine_abs_diff"] for row in rows if "policy/engine_abs_diff" in row]
    assert differences  # of tokens that the trained version sampled, at the first step at least
    assert max(differences) < 1e-5


def test_asynchronous_training_is_interrupted_and_goes_on(command_line: CommandLine, random_policy: Path) -> None:
    given = command_line.counting(
        random_policy, "name=ahead", "rollout.schedule=asynchronous", "rollout.max_staleness=2", *SLOW, *WEIGHTED
    )
    process = command_line.start(*given)
    wait_until(lambda: len(trained_rows(command_line, "ahead")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    run = command_line.folder / "runs" / "ahead"
    newest = max((run / "checkpoints").glob("step-*"))
    queue = json.loads((newest / "state.json").read_text())["state"]["worker"]["queue"]
    assert queue  # more than the batch that trained was under way

    said = command_line.run("train", "--resume", "name=ahead")
    assert_on_time(command_line, "ahead", 2)
    trained = groups_trained(run)
    # Nothing is lost and nothing is trained twice, and the last step leaves nothing over.
    assert sorted(index for step in trained.values() for index in step) == list(range(15))
    assert {row["index"] for row in queue} <= set(range(15))
    assert Counter(map(len, trained.values())) == {3: 5}


def test_overlapped_training_on_two_ranks(command_line: CommandLine, random_policy: Path) -> None:
    ranks = ["training.num_processes=2", "training.zero_stage=3", "training.persistence_threshold=0"]
    ranks += ["rollout.schedule=overlapped"]
    command_line.run(*command_line.counting(random_policy, "name=over", *ranks, *SLOW, *WEIGHTED))
    assert_on_time(command_line, "over", 1)
    assert groups_trained(command_line.folder / "runs" / "over") == {
        step: [3 * step - 3, 3 * step - 2, 3 * step - 1] for step in range(1, 6)
    }
    assert [row["staleness/mixed_share"] for row in trained_rows(command_line, "over")] == [0.0] * 5
    assert [row["staleness/mean"] for row in trained_rows(command_line, "over")] == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["overlapped", "asynchronous"])
def test_the_run_ends_with_its_worker(command_line: CommandLine, random_policy: Path, schedule: str) -> None:
    given = command_line.counting(random_policy, "name=dead", f"rollout.schedule={schedule}", *SLOW, *WEIGHTED)
    process = command_line.start(*given)
    wait_until(lambda: len(trained_rows(command_line, "dead")) >= 1, process)
    children = psutil.Process(process.pid).children(recursive=True)
    worker = next(one for one in children if "agentrl.training.worker.process" in command_of(one))
    worker.kill()
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 1, said
    assert "error: rollout worker: the connection closed while waiting for" in said
    assert "Traceback" not in said, said


@pytest.mark.parametrize("separate", ["rollout.schedule=asynchronous", "cluster.restarts=1"])
def test_an_unavailable_service_ends_a_run_in_several_processes_with_one_message(
    command_line: CommandLine, random_policy: Path, separate: str
) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    settings = command_line.counting(random_policy, "name=down", separate)[4:]
    said = command_line.run("train", "--env", f"openenv:{server}", *settings, code=1)
    assert f"error: OpenEnv server {server} cannot be reached: [Errno 111] Connection refused" in said
    assert "Traceback" not in said, said
