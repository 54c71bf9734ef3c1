"""Several training ranks and the rollout worker's own process, through the command line."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from shared import command_of

from .conftest import DEADLINE, CommandLine, wait_until
from .test_schedules import groups_trained

pytestmark = pytest.mark.slow

# The estimator is one that the environment's module registers.
TWO = ["--num-processes", "2", "rollout.problems_per_step=4", "algorithm.estimator=doubled"]
TWO += ["training.zero_stage=3", "training.persistence_threshold=0"]
SLOW = ["environment.kwargs.seconds=0.05", "rollout.concurrency=2", "training.steps=3"]

CONTINUE = "agentrl train --resume name=two runs_dir=runs"
ONE_STEP = "1 step was completed, all saved in a checkpoint"


def family(pid: int) -> dict[str, list[psutil.Process]]:
    """The processes under ``pid`` by what they are."""
    found: dict[str, list[psutil.Process]] = {"run.rank": [], "worker.process": []}
    for process in psutil.Process(pid).children(recursive=True):
        for part in command_of(process):
            if part.startswith("agentrl.training."):
                found[part.removeprefix("agentrl.training.")].append(process)
    return found


def wait_for_rollouts(command_line: CommandLine, process: subprocess.Popen[str], steps: int) -> None:
    """Return when ``steps`` more steps of the environment have been played."""
    wanted = command_line.tallied() + steps
    wait_until(lambda: command_line.tallied() >= wanted, process)


def wait_for_process(process: subprocess.Popen[str], module: str) -> dict[str, list[psutil.Process]]:
    """Return the processes of the run as soon as one of them runs ``module``."""
    found: dict[str, list[psutil.Process]] = {}

    def started() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived child
            found.update(family(process.pid))
        return bool(found.get(module))

    wait_until(started, process)
    return found


def assert_all_end(processes: dict[str, list[psutil.Process]]) -> None:
    _, alive = psutil.wait_procs([one for kind in processes.values() for one in kind], timeout=60)
    assert not alive


def test_two_ranks_go_on_after_every_end(command_line: CommandLine, random_policy: Path) -> None:
    run = command_line.folder / "runs" / "two"
    started = command_line.counting(random_policy, "name=two", "checkpoint.every=1", *TWO, *SLOW)
    for module, number in (("run.rank", signal.SIGTERM), ("worker.process", signal.SIGINT)):
        # The run is asked to stop as soon as such a process is there.
        process = command_line.start(*started)
        processes = wait_for_process(process, module)
        process.send_signal(number)
        said = process.communicate(timeout=DEADLINE)[0]
        assert process.returncode == 130, said
        assert "Traceback" not in said, said
        assert said.endswith(f"stopped on request; no step was completed. To continue: {CONTINUE}\n"), said
        assert_all_end(processes)
        started = ["train", "--resume", "name=two"]

    # The worker is killed while both ranks wait for the plan of step 2. Two steps of the environment a trajectory: 2
    # trajectories of the evaluation and 16 of step 1 are over.
    process = command_line.start(*started)
    wait_for_rollouts(command_line, process, 2 * (2 + 16) + 3)
    processes = family(process.pid)
    assert [len(processes["run.rank"]), len(processes["worker.process"])] == [2, 1]
    processes["worker.process"][0].kill()
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 1
    assert "error: rollout worker: the connection closed while waiting for the plan of step 2" in said
    assert said.endswith(f"lost the rollout worker\n{ONE_STEP}. To continue: {CONTINUE}\n"), said
    assert_all_end(processes)

    # A rank is killed.
    process = command_line.start("train", "--resume", "name=two")
    wait_for_rollouts(command_line, process, 3)
    processes = family(process.pid)
    next(one for one in processes["run.rank"] if one.environ()["RANK"] == "1").kill()
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 1
    end = rf"error: training rank 1 on \S+ was killed by SIGKILL\n{ONE_STEP}. To continue: {CONTINUE}\n"
    assert re.search(end + r"help: \S+was-killed-by\n$", said), said
    assert "stopping at the next safe point" not in said  # nobody has asked for that
    assert_all_end(processes)

    # The run is asked to stop.
    process = command_line.start("train", "--resume", "name=two")
    wait_for_rollouts(command_line, process, 3)
    processes = family(process.pid)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 130, said
    assert said.count("stopping at the next safe point (repeat to stop at once)") == 1
    again = f"agentrl train --resume name=two runs_dir={run.parent}\n"
    assert said.endswith(f"stopped after step 1; checkpoint saved. To continue: {again}"), said
    assert "Traceback" not in said, said
    assert_all_end(processes)

    # And it goes on to its end.
    said = command_line.run("train", "--resume", "name=two", fresh=True)
    assert said.count("resumed after step 1") == 1
    assert command_line.steps("two") == [1, 2, 3]
    assert sorted(index for groups in groups_trained(run).values() for index in groups) == list(range(3 * 4))
    differences = [row["policy/engine_abs_diff"] for row in command_line.metrics("two") if "policy/updates" in row]
    assert max(differences) < 1e-5  # the worker's copy is the trained policy, step after step
    assert (run / "policy" / "model.safetensors").is_file()
    assert not (run / ".weights").exists()
    for noise in ("Loading weights", "Writing model", "[WARNING]", "Warning:", "Traceback"):
        assert noise not in said


def test_a_killed_command_leaves_no_process(command_line: CommandLine, random_policy: Path) -> None:
    process = command_line.start(*command_line.counting(random_policy, "name=dead", *TWO, *SLOW))
    wait_for_rollouts(command_line, process, 2 * (2 + 16) + 3)
    processes = family(process.pid)
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert_all_end(processes)
