"""An agent program from the command line: it learns, with two sequences a rollout, and its policy is evaluated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from envs.docker_engine import BASE_IMAGE, need_docker

from agentrl.telemetry.run_directory import RunDirectory

pytestmark = pytest.mark.slow

AGENT = '''
import openai


async def run(problem, *, base_url, api_key, model):
    """Two conversations about a problem, as with a sub-agent; letters in the second reply pay."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
        for text in (problem.statement, "Letters, please."):
            messages = [{"role": "user", "content": text}]
            reply = await policy.chat.completions.create(model=model, messages=messages)
    said = reply.choices[0].message.content
    return sum(character.isalpha() for character in said) / max(1, len(said))
'''
SETTINGS = [
    "rollout.problems_per_step=6",
    "rollout.group_size=6",
    "rollout.max_turn_tokens=8",
    "optimizer.learning_rate=0.01",
    "training.steps=20",
    "training.threads=1",
    "evaluation.samples=1",
    "telemetry.plots=false",
    "checkpoint.every=20",
    "name=agents",
]


def test_an_agent_learns_in_twenty_steps_and_its_policy_is_evaluated(command_line: Any, random_policy: Path) -> None:
    (command_line.folder / "solver.py").write_text(AGENT)
    start = ["--env", "agent:solver:run", "--config", "tiny", f"model.path={random_policy}"]
    said = command_line.run("train", *start, *SETTINGS)
    assert "agent: solver:run, in an event loop" in said
    run = RunDirectory(command_line.folder / "runs" / "agents")
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.1
    assert {row["gateway/branches_mean"] for row in rows if "gateway/branches_mean" in row} == {2.0}
    played = list(run.read_trajectories(20))
    assert [row["branch"] for row in played] == [0, 1] * (len(played) // 2)
    assert sum(row["weight"] for row in played) == pytest.approx(len(played) / 2)
    policy = command_line.folder / "runs" / "agents" / "policy"
    found = ["eval", "--env", "agent:solver:run", "--model", str(policy), "--n", "1"]
    assert "avg@1" in command_line.run(*found)


def test_a_command_in_a_container_trains(command_line: Any, random_policy: Path) -> None:
    need_docker()
    harbor = Path(__file__).parents[2] / "examples" / "harbor"
    start = [
        "--env",
        f"harbor:{harbor}/tasks:python3 /agent/agent.py",
        "--config",
        "tiny",
        f"model.path={random_policy}",
    ]
    images = [f"environment.{name}={BASE_IMAGE}" for name in ("build_args.BASE_IMAGE", "helper_image")]
    small = [
        f"data.train.0.path=harbor:{harbor}/tasks/write-word",
        "data.eval=[]",
        f"environment.agent_files={harbor}/agent",
        "gateway.max_generations=2",
        "rollout.problems_per_step=1",
        "rollout.group_size=3",
        "algorithm.drop_zero_variance=false",
        "training.steps=2",
    ]
    said = command_line.run("train", *start, *images, *SETTINGS, *small)
    assert "agent: python3 /agent/agent.py, in a separate container for each rollout" in said
    rows = [row for row in command_line.metrics("agents") if "policy/updates" in row]
    assert [(row["policy/updates"], row["groups/excluded"]) for row in rows] == [(1, 0), (1, 0)]
    played = list(RunDirectory(command_line.folder / "runs" / "agents").read_trajectories(2))
    assert [row["ended"] for row in played] == ["turn_limit"] * 3


def test_the_agents_sdk_trains_as_in_the_benchmark() -> None:
    """Two steps of ``benchmarks/agents.py``; it ends with 1 where an agent failed."""
    script = Path(__file__).parents[2] / "benchmarks" / "agents.py"
    command = [sys.executable, str(script), "--clients", "agents_sdk", "--steps", "2"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "| agents_sdk | " in made.stdout
