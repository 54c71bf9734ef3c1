"""The Slurm batch script that is shipped: it tells every rank its place and the meeting point.

Slurm's programs are stand-ins, which start the tasks on this machine with the variables that Slurm sets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "configs" / "cluster" / "slurm.sh"
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" &
    started+=($!)
done
for one in "${started[@]}"; do wait "$one" || exit; done
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames n[1-2]" ] || exit 9
printf 'n1\\nn2\\n'
"""
AGENTRL = """#!{python}
import json, os, sys
from agentrl.cluster.launchers import set_variables_from_slurm, require_launcher_variables, started_by_launcher
assert started_by_launcher("environment")
set_variables_from_slurm()
require_launcher_variables()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK")
line = json.dumps([sys.argv[1:], [os.environ[name] for name in names]]) + "\\n"
os.write(1, line.encode())
raise SystemExit(int(os.environ.get("CODE_OF_RANK_" + os.environ["RANK"], 0)))
"""


def submitted(folder: Path, *arguments: str, **variables: str) -> tuple[int, list[tuple[list[str], list[str]]]]:
    """The exit code of the job, and what each rank was given: its arguments, and its variables."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "agentrl": AGENTRL.format(python=sys.executable)}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    of_slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "50123", "SLURM_CPUS_PER_TASK": "8"}
    of_slurm |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | of_slurm | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return done.returncode, sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: int(line[1][0]))


def test_every_task_is_a_rank_that_knows_the_meeting_point(tmp_path: Path) -> None:
    code, ranks = submitted(tmp_path, "--resume", "name=run one")
    assert code == 0
    assert [arguments for arguments, _ in ranks] == [["train", "cluster=environment", "--resume", "name=run one"]] * 4
    assert [variables for _, variables in ranks] == [
        [str(rank), "4", str(rank % 2), "2", "n1", "30123", "8"] for rank in range(4)
    ]


def test_the_job_fails_with_its_rank(tmp_path: Path) -> None:
    assert submitted(tmp_path, CODE_OF_RANK_2="4")[0] == 4


def test_slurm_is_asked_for_what_the_ranks_need() -> None:
    asked = [line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    needed = {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=8", "--signal=TERM@300"}
    assert needed <= set(asked)
