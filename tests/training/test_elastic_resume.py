"""A run that goes on with other ranks, at another ZeRO stage, is the run that never stopped, to rounding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .conftest import CommandLine, write_random_policy
from .test_resume import TIMINGS, trajectories

pytestmark = pytest.mark.slow

# Critic, two updates a step, an adaptive penalty and a schedule: all that a checkpoint holds.
_PPO = [
    "algorithm.estimator=gae",
    "algorithm.loss=ppo",
    "algorithm.updates_per_step=2",
    "kl.coefficient=0.05",
    "kl.placement=reward",
    "kl.controller=adaptive",
    "training.deterministic=true",
    "rollout.problems_per_step=2",
    "evaluation.every=9",
]
_PARTS = [(1, 1, 1), (2, 3, 1), (2, 2, 2), (1, 2, 1)]
"""Ranks, ZeRO stage and ranks that share rows, of each step."""


def compared(command_line: CommandLine, name: str) -> list[dict[str, Any]]:
    """Metrics of trained steps that do not depend on how the work was dealt."""
    rows = [row for row in command_line.metrics(name) if "policy/updates" in row]
    return [{key: value for key, value in row.items() if not key.startswith((*TIMINGS, "rollout/"))} for row in rows]


def test_a_run_goes_on_with_other_ranks_and_back(command_line: CommandLine, random_policy: Path) -> None:
    start = command_line.counting(random_policy, *_PPO)
    command_line.run(*start, "name=whole", "training.zero_stage=2", "training.steps=4")
    said = ""
    for step, (ranks, stage, shared) in enumerate(_PARTS, start=1):
        how = [f"training.steps={step}", f"training.num_processes={ranks}", f"training.zero_stage={stage}"]
        how.append(f"training.sequence_parallel={shared}")
        said = command_line.run(*(start if step == 1 else ["train", "--resume"]), "name=parts", *how)
    assert "resumed after step 3, from a checkpoint of 2 ranks, on 1 rank" in said
    whole, parts = compared(command_line, "whole"), compared(command_line, "parts")
    assert [row["step"] for row in parts] == [1, 2, 3, 4]
    for one, other in zip(whole, parts, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    runs = command_line.folder / "runs"
    played = [[(row["group"], row["prompt_ids"]) for row in trajectories(runs / name)] for name in ("whole", "parts")]
    assert played[0] == played[1]
    weights = [load_file(runs / name / "policy" / "model.safetensors") for name in ("whole", "parts")]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_another_model_is_one_message(command_line: CommandLine, tmp_path: Path) -> None:
    write_random_policy(tmp_path)
    command_line.run(*command_line.counting(tmp_path / "policy", "name=one", "training.steps=1"))
    shutil.rmtree(tmp_path / "policy")
    write_random_policy(tmp_path, hidden_size=48)
    said = command_line.run("train", "--resume", "name=one", "training.steps=2", code=2)
    assert said.count("belongs to a different model: causal_lm.model.embed_tokens.weight has the shape [300, 32]") == 1
    assert "and the shape [300, 48] in this model; set model.path to the model that the run started from" in said
    assert "Traceback" not in said
