"""SIGTERM at every phase of a run, on any rank, in all schedules: it ends with 130 and goes on as if never stopped.

A step whose plan was handed out is finished everywhere, and nothing is lost, trained twice or left waiting. To repeat
the tests with two ranks, as often as a race needs that happens now and then::

    for i in $(seq 30); do pytest tests/training/test_signals.py -k two_ranks -q || break; done
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest
from ranks import free_port
from warm import WarmPopen

from agentrl.errors import EXIT_PEER_LOST
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.worker.service import WorkerLostError, receive_message

from .conftest import DEADLINE, CommandLine, wait_until
from .test_ranks import assert_all_end, family
from .test_resume import trajectories, without_timings
from .test_schedules import groups_trained

pytestmark = pytest.mark.slow


STEPS = 12
EVERY_PHASE = ("plan", "forward", "backward", "update", "evaluation", "transfer", "checkpoint")
# Who is told, in turn: everybody as by a launcher, or one rank alone.
TOLD = ("01", "0", "1")
WEIGHTED = ["correction.weights=token"]


def order(moment: str, told: str, *, at: str = "01") -> dict[str, str]:
    return {"moment": moment, "do": "tell", "tell": told, "at": at}


class Ranks:
    """Training ranks of a test, each a process of its own, as a foreign launcher starts them."""

    def __init__(
        self, folder: Path, policy: Path, *settings: str, runs: dict[str, list[dict[str, str]]], count: int
    ) -> None:
        self._folder = folder
        (folder / "held_out.jsonl").write_text('{"problem": "held out: 1 + 1", "answer": "2"}\n')
        line = CommandLine(folder)
        case = {"settings": [*line.counting(policy)[3:], *_SETTINGS, *settings], "runs": runs}
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | place | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        script = str(Path(__file__).with_name("runs_that_are_stopped.py"))
        self.processes = []
        for rank in range(count):
            with (folder / f"said-{rank}").open("w") as said:
                self.processes.append(
                    WarmPopen(
                        [sys.executable, script, json.dumps(case)],
                        cwd=folder,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        partial = folder / "processes.partial"
        partial.write_text(json.dumps([process.pid for process in self.processes]))
        partial.rename(folder / "processes.json")

    def end(self) -> list[int]:
        """Wait for all ranks; their exit codes."""
        deadline = time.monotonic() + DEADLINE
        try:
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def said(self) -> str:
        return "".join((self._folder / f"said-{rank}").read_text() for rank in range(len(self.processes)))

    def codes(self) -> list[dict[str, list[int]]]:
        """By rank and run, what each call of train returned."""
        return [json.loads((self._folder / f"codes-{rank}.json").read_text()) for rank in range(len(self.processes))]


_SETTINGS = [
    f"training.steps={STEPS}",
    "checkpoint.every=3",
    "evaluation.every=3",
    "data.eval.0.path=held_out.jsonl",
    "telemetry.console=off",
]


def stopped(folder: Path, policy: Path, *settings: str, moments: list[dict[str, str]], count: int, whole: bool) -> Path:
    """A run that is stopped at each of ``moments``, gone on with and ended; its directory.

    ``whole``: beside it stands one that was never stopped.
    """
    runs = {"stopped": moments} | ({"whole": []} if whole else {})
    ranks = Ranks(folder, policy, *settings, runs=runs, count=count)
    codes = ranks.end()
    said = ranks.said()
    assert codes == [0] * count, said
    assert "Traceback" not in said, said
    assert ranks.codes() == [{name: [130] * len(orders) + [0] for name, orders in runs.items()}] * count, said
    return folder / "runs" / "stopped"


def assert_nothing_lost(run: Path) -> None:
    """All steps in order, each with its trajectories and evaluation, each group trained once."""
    rows = list(RunDirectory(run).metrics())
    assert [row["step"] for row in rows if "policy/updates" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/avg_at_k" in row] == list(range(0, STEPS + 1, 3))
    trained = groups_trained(run)
    assert list(trained) == list(range(1, STEPS + 1))
    assert sorted(index for groups in trained.values() for index in groups) == list(range(3 * STEPS))


def assert_as_if_never_stopped(run: Path) -> None:
    whole = run.with_name("whole")
    assert without_timings(list(RunDirectory(run).metrics())) == without_timings(list(RunDirectory(whole).metrics()))
    assert trajectories(run) == trajectories(whole)


def test_one_rank_synchronous(tmp_path: Path, random_policy: Path) -> None:
    moments = [order(phase, "0") for phase in EVERY_PHASE if phase != "transfer"]  # the engine shares the weights
    run = stopped(tmp_path, random_policy, "training.deterministic=true", moments=moments, count=1, whole=True)
    assert_nothing_lost(run)
    assert_as_if_never_stopped(run)


def test_two_ranks_synchronous(tmp_path: Path, random_policy: Path) -> None:
    settings = ["training.deterministic=true"]
    moments = [order(phase, TOLD[place % 3]) for place, phase in enumerate(EVERY_PHASE)]
    run = stopped(tmp_path, random_policy, *settings, moments=moments, count=2, whole=True)
    assert_nothing_lost(run)
    assert_as_if_never_stopped(run)


@pytest.mark.parametrize(
    ("schedule", "phases"),
    [
        ("overlapped", ("settle", *EVERY_PHASE)),
        ("asynchronous", ("plan", "restore", "update", "evaluation", "transfer")),
    ],
)
def test_two_ranks_with_rollouts_beside(tmp_path: Path, random_policy: Path, schedule: str, phases: tuple[str]) -> None:
    settings = [f"rollout.schedule={schedule}", *WEIGHTED]
    moments = [order(phase, TOLD[place % 3]) for place, phase in enumerate(phases)]
    assert_nothing_lost(stopped(tmp_path, random_policy, *settings, moments=moments, count=2, whole=False))


def test_a_rank_that_fails_alone_ends_the_others(tmp_path: Path, random_policy: Path) -> None:
    failing = {"moment": "forward", "do": "fail", "tell": "", "at": "1"}
    ranks = Ranks(tmp_path, random_policy, runs={"failed": [failing]}, count=2)
    codes = ranks.end()
    said = ranks.said()
    assert codes == [EXIT_PEER_LOST, 1], said
    assert "this rank fails alone" in said, said
    assert "rank 0: the rollout worker or another rank has exited" in said, said


def test_a_stuck_rank_is_named_and_the_run_goes_on(command_line: CommandLine, random_policy: Path) -> None:
    orders, taken = command_line.folder / "order.json", command_line.folder / "taken.json"
    stuck = {"moment": "forward 3", "at": "1", "processes": []}
    orders.write_text(json.dumps({**stuck, "do": "stall"}))
    settings = ["--num-processes", "2", "cluster.restarts=2", "cluster.deadline=10", "training.steps=8"]
    settings += ["--env", "stopping_env:StoppingEnv", "name=stuck", "checkpoint.every=1"]
    process = command_line.start(*command_line.counting(random_policy, *settings))
    wait_until(taken.exists, process)
    taken.unlink()
    partial = orders.with_suffix(".partial")  # the ranks look for orders meanwhile
    partial.write_text(json.dumps({**stuck, "do": "halt"}))  # SIGSTOP, by itself
    partial.rename(orders)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, said
    reports = [line for line in said.splitlines() if line.startswith("rollout worker: training rank 1 on ")]
    assert len(reports) == 2, said
    where = r" is stuck: no progress for \d+ s in the training of step {}, longer than the \d+ s allowed"
    assert re.search(where.format(4), reports[0]), said
    assert re.search(where.format("[67]"), reports[1]), said
    assert "its process does not respond" in reports[1]
    assert f"restart 1 of 2 from the last checkpoint: training rank 1 on {socket.gethostname()} was stuck" in said
    assert command_line.steps("stuck") == list(range(1, 9))


def test_rollouts_may_take_longer_than_a_collective(tmp_path: Path, random_policy: Path) -> None:
    # Two turns of 7 s: in the plan of step 1 and in the batch that is under way when step 1 is trained.
    slow = ["training.collective_deadline=13", "environment.kwargs.seconds=7", "training.steps=2", "data.eval=[]"]
    ranks = Ranks(tmp_path, random_policy, "rollout.schedule=overlapped", *WEIGHTED, *slow, runs={"long": []}, count=2)
    codes = ranks.end()
    said = ranks.said()
    assert codes == [0, 0], said
    assert ranks.codes() == [{"long": [0]}] * 2, said


def test_asked_twice_two_ranks_end_at_once_whatever_they_wait_for(
    command_line: CommandLine, random_policy: Path
) -> None:
    slow = ["environment.kwargs.seconds=0.05", "rollout.concurrency=2", "--num-processes", "2"]
    process = command_line.start(*command_line.counting(random_policy, "name=twice", *slow))
    wait_until(lambda: len(command_line.steps("twice")) >= 1, process)
    processes = family(process.pid)
    stuck = next(one for one in processes["run.rank"] if one.environ()["RANK"] == "1")
    stuck.suspend()  # its peer waits for it, in a collective or at the worker
    deadline = time.monotonic() + DEADLINE
    alive = processes["run.rank"]
    while alive and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(alive, timeout=2.0)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    assert_all_end(processes)


def test_a_worker_that_does_not_answer_is_not_waited_for_once_the_run_is_to_stop() -> None:
    here, there = Pipe()
    asked = threading.Event()
    asked.set()
    with pytest.raises(WorkerLostError, match=r"of waiting for the plan \(0\.1 s of them after a request to stop\)"):
        receive_message(here, seconds=3600.0, waiting_for="the plan", stop_requested=asked, stop_timeout=0.1)
    there.send("the plan")  # asked or not: what comes in time is taken
    assert (
        receive_message(here, seconds=3600.0, waiting_for="the plan", stop_requested=asked, stop_timeout=60.0)
        == "the plan"
    )
