"""Runs that are killed or stopped go on as if nothing had happened: nothing lost, nothing trained twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.telemetry.run_directory import RunDirectory

from .conftest import DEADLINE, CommandLine, wait_until

pytestmark = pytest.mark.slow

KEYS = ("scores", "best")
FORKS = [
    "environment.interpreter=session",
    "rollout.branching.width=2",
    "rollout.branching.where=measured",
    "rollout.branching.leaves=4",
    "rollout.branching.live=2",
    "rollout.concurrency=16",
    "rollout.budget=neyman",
    "algorithm.siblings=pooled",
]
"""Rollouts that fork with their interpreters, with a budget; two branches of a tree are played at the same time."""
HEAD = "model.embed_tokens.weight"
TIMINGS = ("time/", "tokens_per_s", "rollout/seconds")


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the process alone; what it started must end by itself."""
    process.kill()
    process.communicate()


def without_timings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMINGS)} for row in rows]


def trajectories(run: Path) -> list[dict[str, Any]]:
    directory = RunDirectory(run)
    rows = [row for step in directory.steps_with_trajectories() for row in directory.read_trajectories(step)]
    return [{key: value for key, value in row.items() if key not in ("seconds", "tool_calls")} for row in rows]


def test_a_deterministic_run_killed_again_and_again_ends_like_one_never_killed(
    command_line: CommandLine, cold_policy: Path
) -> None:
    deterministic = command_line.simpletir(cold_policy, "training.deterministic=true", *FORKS)
    command_line.run(*deterministic, "name=whole")
    whole = command_line.folder / "runs" / "whole"
    assert any(row["path_weight"] == 0.5 for row in trajectories(whole))
    killed = command_line.folder / "runs" / "killed"
    draw = random.Random()
    moments: list[tuple[Callable[[], bool], float]] = [
        (lambda: 1 in command_line.steps("killed"), draw.random() * 0.3),  # no checkpoint yet; rollout or update
        # While a checkpoint is written, or just after.
        (lambda: any((killed / "checkpoints").glob("*step-000002*")), draw.random() * 0.03),
        ((killed / "checkpoints" / "step-000004").exists, 0.0),  # after the last step, before the export
    ]
    for index, (moment, delay) in enumerate(moments):
        process = command_line.start(*(deterministic if index == 0 else ["train", "--resume"]), "name=killed")
        wait_until(moment, process)
        time.sleep(delay)
        kill(process)
    command_line.run("train", "--resume", "name=killed")

    assert command_line.steps("killed") == [1, 2, 3, 4]
    assert without_timings(command_line.metrics("killed")) == without_timings(command_line.metrics("whole"))
    assert trajectories(killed) == trajectories(whole)
    weights = [load_file(run / "policy" / "model.safetensors") for run in (killed, whole)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    start = load_file(cold_policy / "model.safetensors")
    assert not torch.equal(start["model.embed_tokens.weight"], weights[0]["model.embed_tokens.weight"])
    scores, best = ([json.loads((run / "summary.json").read_text())[key] for run in (killed, whole)] for key in KEYS)
    assert scores[0] == scores[1]
    assert [score["step"] for score in scores[0]] == [0, 4]
    assert best[0] == best[1]
    assert torch.equal(*(load_file(run / best[0]["policy"] / "model.safetensors")[HEAD] for run in (killed, whole)))


def test_a_stopped_run_goes_on_with_the_problems_it_had_issued(command_line: CommandLine, random_policy: Path) -> None:
    run = command_line.folder / "runs" / "stopped"
    slow = ["environment.kwargs.seconds=0.05", "rollout.concurrency=2", "rollout.problems_per_step=6"]
    start = command_line.counting(random_policy, "name=stopped", *slow, "training.steps=3", "evaluation.samples=1")
    # Two steps of the environment a trajectory: one of the evaluation, 24 of step 1, some of step 2 are over.
    stops = [(signal.SIGTERM, start, 2 * (1 + 24) + 3), (signal.SIGINT, ["train", "--resume", "name=stopped"], 3)]
    for number, arguments, steps in stops:
        wanted = command_line.tallied() + steps
        process = command_line.start(*arguments)
        wait_until(lambda wanted=wanted: command_line.tallied() >= wanted, process)  # type: ignore[misc]
        # As a terminal does: to every process of the group.
        os.killpg(process.pid, number)
        said = process.communicate(timeout=DEADLINE)[0]
        assert process.returncode == 130, said
        assert "stopped after step 1; checkpoint saved" in said
        assert "agentrl train --resume name=stopped runs_dir=runs" in said
        assert "Traceback" not in said
        state = json.loads((run / "checkpoints" / "step-000001" / "state.json").read_text())["state"]
        issued = [row["problem"]["id"] for row in state["worker"]["queue"]]
        # The next problem is issued when the first rollout of the one before has measured its prompt.
        assert 1 <= len(issued) <= 6

    assert "resumed after step 1" in command_line.run("train", "--resume", "name=stopped")
    assert command_line.steps("stopped") == [1, 2, 3]
    rows = trajectories(run)
    played = list(dict.fromkeys(row["problem"]["id"] for row in rows if row["step"] == 2))
    assert len(played) == 6
    assert played[: len(issued)] == issued
    # No group is lost or trained twice.
    groups = [sorted({row["group"] for row in rows if row["step"] == step}) for step in (1, 2, 3)]
    assert [index for step in groups for index in step] == list(range(3 * 6))


def test_checkpoints_are_pruned_and_the_export_is_plain_transformers(
    command_line: CommandLine, random_policy: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = command_line.run(
        *command_line.counting(random_policy, "name=plain", "checkpoint.keep=2", "checkpoint.every=1"), fresh=True
    )
    for noise in ("Loading weights", "Writing model", "[WARNING]", "Warning:", "Traceback"):
        assert noise not in said
    run = command_line.folder / "runs" / "plain"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", "step-000003", "step-000004"]
    assert (run / "policy" / "README.md").read_text().startswith("---\nlibrary_name: transformers")
    model, report = AutoModelForCausalLM.from_pretrained(run / "policy", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert type(model.lm_head) is torch.nn.Linear
    tokenizer = AutoTokenizer.from_pretrained(run / "policy")
    assert tokenizer.decode(tokenizer("12 = 12")["input_ids"]) == "12 = 12"

    # Resuming what is finished repeats nothing; with more steps it goes on.
    before = command_line.metrics("plain")
    assert [row["step"] for row in before if "eval/avg_at_k" in row] == [0, 4]
    command_line.run("train", "--resume", "name=plain")
    assert command_line.metrics("plain") == before
    command_line.run("train", "--resume", "name=plain", "training.steps=5")
    assert command_line.steps("plain") == [1, 2, 3, 4, 5]
    assert [row["step"] for row in command_line.metrics("plain") if "eval/avg_at_k" in row] == [0, 4, 5]
