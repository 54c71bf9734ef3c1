"""Twenty steps with adapters from a cold-started policy, on the command line: it learns to run programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

REWARD = '''
def ran(problem, conversation, verdict):
    """1 for a program that printed a number."""
    said = [turn.text for turn in conversation.turns if turn.role == "tool"]
    return float(any("Error" not in text and any(map(str.isdigit, text)) for text in said))
'''
SETTINGS = [
    "coldstart.demonstrations=null",
    "data.eval=[]",
    "environment.max_turns=2",
    "rollout.problems_per_step=8",
    "rollout.group_size=8",
    "optimizer.warmup_steps=1",
    "training.steps=20",
    "training.deterministic=true",
    "training.threads=1",
    "telemetry.plots=false",
    "telemetry.tokens_every=0",
    "checkpoint.every=20",
    "name=adapted",
]
TRAJECTORIES = 5 * 64


def test_adapters_learn_in_twenty_steps(command_line: Any, cold_policy: Path) -> None:
    (command_line.folder / "rewards.py").write_text(REWARD)
    start = ["--config", "arithmetic", "--config", "lora", f"model.path={cold_policy}", "--reward", "rewards:ran"]
    said = command_line.run("train", *start, *SETTINGS)
    assert "training: adapters of 0.04M parameters on 0.12M frozen ones" in said
    rows = [row for row in command_line.metrics("adapted") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [*range(1, 21)]
    assert rows[-1]["optimizer/learning_rate"] == pytest.approx(10 * 3e-4)
    first, last = (sum(row["reward/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    error = math.sqrt((first * (1 - first) + last * (1 - last)) / TRAJECTORIES)
    assert last > first + 3 * error
    config = json.loads((command_line.folder / "runs/adapted/policy/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 32)
