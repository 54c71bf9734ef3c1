"""The ranks of a foreign launcher: torchrun starts the command itself, once a rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import finish, start_ranks

from agentrl.cluster.local import THIS_MACHINE

from .conftest import DEADLINE, CommandLine, wait_until
from .test_ranks import family
from .test_resume import without_timings

pytestmark = pytest.mark.slow

TWO = ["training.steps=2", "training.zero_stage=3", "training.persistence_threshold=0", "training.deterministic=true"]


def test_torchrun_starts_the_same_ranks_as_the_command(command_line: CommandLine, random_policy: Path) -> None:
    arguments = command_line.counting(random_policy, *TWO)
    command_line.run(*arguments, "name=own", "--num-processes", "2")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "agentrl.cli"]
    done = subprocess.run(
        [sys.executable, *launcher, *arguments, "name=theirs", "cluster=environment"],
        cwd=command_line.folder,
        env=command_line.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout
    for name in ("own", "theirs"):
        folder = command_line.folder / "runs" / name / "logs"
        logs = {log.name: log.read_text() for log in folder.iterdir()}
        assert sorted(logs) == [f"{THIS_MACHINE.node}-{process}.log" for process in ("rank-0", "rank-1", "worker-0")]
        assert "step 2/2" in logs[f"{THIS_MACHINE.node}-rank-0.log"]
    own, theirs = (without_timings(command_line.metrics(name)) for name in ("own", "theirs"))
    assert command_line.steps("theirs") == [1, 2]
    assert [sorted(row) for row in theirs] == [sorted(row) for row in own]
    for row, other in zip(own, theirs, strict=True):
        assert other == pytest.approx(row, rel=1e-5, abs=1e-8, nan_ok=True)


def test_a_run_whose_rank_is_killed_goes_on_by_itself_bitwise(command_line: CommandLine, random_policy: Path) -> None:
    steps = ["training.steps=4", "checkpoint.every=1", "training.deterministic=true"]
    arguments = command_line.counting(random_policy, *steps, "environment.kwargs.seconds=0.02")
    process = command_line.start(*arguments, "name=killed", "cluster.restarts=1")
    wait_until(lambda: len(command_line.steps("killed")) >= 2, process)
    (rank,) = family(process.pid)["run.rank"]
    rank.kill()
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, said
    assert re.search(r"training rank 0 on \S+ was killed by SIGKILL; stopping the other ranks", said)
    assert "restart 1 of 1 from the last checkpoint: training rank" in said
    command_line.run(*arguments, "name=whole")
    assert without_timings(command_line.metrics("killed")) == without_timings(command_line.metrics("whole"))


def test_without_its_variables_the_command_says_what_it_needs(command_line: CommandLine, random_policy: Path) -> None:
    said = command_line.run(*command_line.counting(random_policy, "cluster=environment"), code=2)
    assert "missing environment variables for cluster.kind=environment: RANK, WORLD_SIZE, LOCAL_RANK" in said


def test_a_folder_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    for shared in (True, False):
        folders = [tmp_path / str(shared) / ("all" if shared else str(rank)) for rank in range(2)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        finish(start_ranks(Path(__file__).with_name("folder_on_ranks.py"), folders), seconds=300)
        said = [(folder / "refused").read_text() for folder in folders if (folder / "refused").exists()]
        found = [
            re.fullmatch(r"runs_dir: rank 1 on \S+ cannot access the files that rank 0 .* share", text) for text in said
        ]
        assert [one is not None for one in found] == ([] if shared else [True, True])
        assert not [*tmp_path.rglob(".probe-*")]
