"""A run whose memory runs out ends with one message; it continues from its last checkpoint in smaller micro-batches.

The loss of `short_env` allocates more memory than the machine has, on the last rank.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import OutOfMemoryError, SettingsError

from .conftest import DEADLINE, CommandLine

pytestmark = pytest.mark.slow

_TWO = ["rollout.problems_per_step=4", "training.zero_stage=3", "training.persistence_threshold=0"]


def start(command_line: CommandLine, policy: Path, *overrides: str) -> list[str]:
    """A run in which the second step runs out of memory in micro-batches of more than one group."""
    own = ["rollout.problems_per_step=2", "training.micro_batch_tokens=500", "training.steps=2", "checkpoint.every=1"]
    arguments = command_line.counting(policy, *own, "algorithm.loss=short", "evaluation.every=9", *overrides)
    return [item.replace("counting_env:CountingEnv", "short_env:ShortEnv") for item in arguments]


def record(command_line: CommandLine, name: str) -> dict[str, int]:
    path = command_line.folder / "runs" / name / "micro_batch_tokens.json"
    found: dict[str, int] = json.loads(path.read_text())
    return found


MESSAGE = re.compile(
    r"error(?: \(rank 1\))?: rank \d ran out of memory while training step 2, in a micro-batch of \d+ tokens "
    r"\(8 trajectories\): .*DefaultCPUAllocator"
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_restarts_from_its_checkpoint(command_line: CommandLine, random_policy: Path, ranks: int) -> None:
    own = ["cluster.restarts=2", f"--num-processes={ranks}", *(_TWO if ranks == 2 else [])]
    said = command_line.run(*start(command_line, random_policy, *own), "name=short")
    assert len(MESSAGE.findall(said)) == 1, said
    assert re.search(
        rf"restart 1 of 2 from the last checkpoint: training rank {ranks - 1} on \S+ ran out of memory", said
    )
    assert "resumed after step 1" in said
    tokens = record(command_line, "short")["tokens"]
    assert tokens < 500
    assert f"training: micro-batches have {tokens} tokens, because memory ran out" in said
    assert command_line.steps("short") == [1, 2]


def test_torchrun_ends_with_the_message_and_resume_reads_the_record(
    command_line: CommandLine, random_policy: Path
) -> None:
    """No checkpoint is saved by then: the resumed run starts with the first step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "agentrl.cli"]
    own = [*_TWO, "name=short", "cluster=environment", "checkpoint.every=9"]
    done = subprocess.run(
        [sys.executable, *launcher, *start(command_line, random_policy, *own)],
        cwd=command_line.folder,
        env=command_line.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1  # torchrun's own
    assert re.search(rf"exitcode\s*: {OutOfMemoryError.exit_code} ", done.stdout), done.stdout
    assert len(MESSAGE.findall(done.stdout)) == 1, done.stdout
    said = command_line.run("train", "--resume", "name=short", "cluster=local", "--num-processes=1")
    assert f"training: micro-batches have {record(command_line, 'short')['tokens']} tokens" in said
    assert "resumed after step 0" in said
    assert command_line.steps("short") == [1, 2]


def test_a_single_trajectory_that_does_not_fit_ends_the_run(command_line: CommandLine, random_policy: Path) -> None:
    """With the settings' own exit code, although the other rank crashes when its peer is gone."""
    own = ["cluster.restarts=3", "--num-processes=2", *_TWO, "algorithm.loss=shortest"]
    small = ["rollout.max_prompt_tokens=80", "training.micro_batch_tokens=144"]
    arguments = start(command_line, random_policy, *own, *small)
    said = command_line.run(*arguments, "name=short", code=SettingsError.exit_code)
    last = re.split(r"error \(rank 1\): rank 1 ran out of memory .*, in a micro-batch of one trajectory", said)
    assert len(last) == 2, said
    assert "model.checkpoint_offload=true" in last[1]
    assert "from the last checkpoint: training" not in last[1]  # larger micro-batches may have been restarted before
