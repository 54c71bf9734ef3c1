"""Several training ranks and the rollout worker's own process, through the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from .conftest import CommandLine, wait_until

TWO = ["--num-processes", "2", "training.zero_stage=3", "rollout.problems_per_step=4"]
SLOW = ["environment.kwargs.seconds=0.05", "rollout.concurrency=2", "training.steps=3"]
# Two steps of the environment a trajectory: 2 trajectories of the evaluation, 16 of step 1, some of step 2.
IN_STEP_2 = 2 * (2 + 16) + 3


def family(pid: int) -> dict[str, list[psutil.Process]]:
    """The processes under ``pid`` by what they are."""
    found: dict[str, list[psutil.Process]] = {"rank": [], "worker_process": []}
    for process in psutil.Process(pid).children(recursive=True):
        for part in process.cmdline():
            if part.startswith("agentrl.training.") and "launch" not in " ".join(process.cmdline()):
                found[part.removeprefix("agentrl.training.")].append(process)
    return found


def assert_all_end(processes: dict[str, list[psutil.Process]]) -> None:
    _, alive = psutil.wait_procs([one for kind in processes.values() for one in kind], timeout=60)
    assert not alive


def test_two_ranks_train_stop_on_a_signal_and_go_on(command_line: CommandLine, random_policy: Path) -> None:
    process = command_line.start(*command_line.counting(random_policy, "name=two", *TWO, *SLOW))
    wait_until(lambda: command_line.tallied() >= IN_STEP_2, process)
    processes = family(process.pid)
    assert [len(processes["rank"]), len(processes["worker_process"])] == [2, 1]
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 130, said
    assert said.count("stopped after step 1; checkpoint saved") == 1
    assert_all_end(processes)
    run = command_line.folder / "runs" / "two"
    state = json.loads((run / "checkpoints" / "step-000001" / "state.json").read_text())
    assert len(state["worker"]["ledger"]) == 4

    said = command_line.run("train", "--resume", "name=two")
    assert said.count("resumed after step 1") == 1
    assert command_line.steps("two") == [1, 2, 3]
    differences = [row["policy/engine_abs_diff"] for row in command_line.metrics("two") if "policy/updates" in row]
    assert max(differences) < 1e-5  # the worker's copy is the trained policy, step after step
    assert (run / "policy" / "model.safetensors").is_file()
    assert not (run / ".weights").exists()
    for noise in ("Loading weights", "Writing model", "[WARNING]", "Warning:", "Traceback"):
        assert noise not in said


@pytest.mark.parametrize("victim", ["worker", "rank", "command"])
def test_a_death_ends_the_whole_run(command_line: CommandLine, random_policy: Path, victim: str) -> None:
    process = command_line.start(*command_line.counting(random_policy, "name=dead", *TWO, *SLOW))
    wait_until(lambda: command_line.tallied() >= IN_STEP_2, process)
    processes = family(process.pid)
    if victim == "command":
        process.kill()
    elif victim == "worker":
        processes["worker_process"][0].kill()
    else:
        next(one for one in processes["rank"] if one.environ()["RANK"] == "1").kill()
    said = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert_all_end(processes)
    if victim == "worker":
        assert "error: rollout worker: the connection ended while waiting for the plan of step 2" in said
    if victim == "rank":
        assert "error: a training rank or its launcher was ended by SIGKILL" in said


def test_an_error_of_the_worker_is_one_message(command_line: CommandLine, random_policy: Path) -> None:
    arguments = command_line.counting(random_policy, "name=deadline", *TWO, *SLOW)
    said = command_line.run(*arguments, "rollout.step_deadline=0.2", code=1)
    assert said.count("were rolled out within rollout.step_deadline=0.2 s") == 2  # rank 0 and rank 1
    assert "Traceback" not in said
