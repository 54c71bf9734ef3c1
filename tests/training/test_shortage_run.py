"""A run whose memory is short goes on by itself in smaller micro-batches, and remembers them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import CommandLine
from .test_elastic_resume import compared

pytestmark = pytest.mark.slow

_RANKS = [
    "--num-processes=2",
    "training.zero_stage=3",
    "training.persistence_threshold=0",
    "training.deterministic=true",
    "algorithm.loss=short",
    "rollout.problems_per_step=4",
    "evaluation.every=9",
    "rollout.max_prompt_tokens=100",
]


def test_a_run_goes_on_and_remembers(command_line: CommandLine, random_policy: Path) -> None:
    start = [
        item.replace("counting_env:CountingEnv", "short_env:ShortEnv")
        for item in command_line.counting(random_policy, *_RANKS)
    ]
    said = command_line.run(*start, "name=short", "training.micro_batch_tokens=1000", "training.steps=1")
    assert "step 1: rank 1 ran out of memory in a micro-batch of " in said
    record = json.loads((command_line.folder / "runs" / "short" / "micro_batch_tokens.json").read_text())
    assert record["configured"] == 1000
    resumed = command_line.run("train", "--resume", "name=short", "training.steps=2")
    assert f"training: micro-batches of {record['tokens']} tokens, since memory ran out" in resumed
    assert "ran out of memory in" not in resumed
    command_line.run(*start, "name=small", f"training.micro_batch_tokens={record['tokens']}", "training.steps=2")
    assert compared(command_line, "short") == compared(command_line, "small")
