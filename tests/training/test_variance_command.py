"""``agentrl variance`` from the command line to its files, on rollouts of an environment that needs no sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.algorithms import ESTIMATORS

from .conftest import CommandLine

pytestmark = pytest.mark.slow

OWN = [
    "env=counting_env:CountingEnv",
    "rollout.max_prompt_tokens=300",
    "rollout.max_turn_tokens=8",
    "rollout.max_response_tokens=48",
    "data.train.0.path=builtin:arithmetic",
    "model.dtype=float32",
    "training.threads=1",
]


def test_it_measures_draws_and_says_which_wins(command_line: CommandLine, random_policy: Path) -> None:
    arguments = ["--model", str(random_policy), "--group-sizes", "2,4", "--samples", "8", "--head", *OWN]
    said = command_line.run("variance", *arguments, "--problems", "3", "--output", "measured")
    folder = command_line.folder / "measured"
    record = json.loads((folder / "variance.json").read_text())
    # The environment's module registers an estimator, and the laboratory has one of its own.
    names = {*ESTIMATORS.names(), "doubled", "otb_cross"} - {"gae", "none"}
    assert {(line["estimator"], line["group_size"]) for line in record["lines"]} == {
        (n, s) for n in names for s in (2, 4)
    }
    assert record["measured"] == 3
    for size in (2, 4):
        lines = {line["estimator"]: line for line in record["lines"] if line["group_size"] == size}
        plain, doubled = lines["rloo"], lines["doubled"]
        assert plain["variance"]["value"] > 0
        assert abs(doubled["variance"]["value"] / plain["variance"]["value"] / 4 - 1) < 1e-4
        assert abs(doubled["diagonal"] / plain["diagonal"] / 4 - 1) < 1e-4
        assert abs(doubled["head_variance"] / plain["head_variance"] / 4 - 1) < 1e-4
    assert [text in said for text in ("N=2: ", "N=4: ")] == [True] * 2
    assert all(line in said.replace("\n", " ") for line in record["verdicts"])
    assert (folder / "noise.png").exists()


def test_a_second_call_continues_the_first(command_line: CommandLine, random_policy: Path) -> None:
    """Two problems and then a third are three at once; an older policy and other settings are another measurement."""
    arguments = ["--model", str(random_policy), "--group-sizes", "2,4", "--samples", "8"]
    arguments += ["--estimators", "rloo,tir_otb", *OWN]
    for folder, problems in (("whole", "3"), ("parts", "2"), ("parts", "3")):
        said = command_line.run("variance", *arguments, "--problems", problems, "--output", folder)
    assert "resuming a measurement: 2 of 2 sampled problems are already measured" in said
    whole, parts = ((command_line.folder / name / "problems.jsonl").read_text() for name in ("whole", "parts"))
    assert parts == whole
    assert [json.loads(line)["outcome"] for line in whole.splitlines()].count("measured") == 3

    changed = ["--problems", "3", "--output", "parts", "rollout.temperature=0.9"]
    said = command_line.run("variance", *arguments, *changed, code=2)
    said = said.replace("\n", " ")
    assert "a measurement with temperature=1.0, but temperature is now 0.9: use another --output" in said
    assert (command_line.folder / "parts" / "problems.jsonl").read_text() == whole

    older = ["--problems", "2", "--output", "older", "--behaviour", "int8"]
    command_line.run("variance", *arguments, *older)
    record = json.loads((command_line.folder / "older" / "variance.json").read_text())
    assert record["settings"]["correction"]["weights"] == "token"
    again = json.loads((command_line.folder / "parts" / "variance.json").read_text())
    assert again["settings"]["correction"] is None


def test_mistakes_end_before_anything_is_sampled(command_line: CommandLine, random_policy: Path) -> None:
    model = ["--model", str(random_policy), *OWN]
    mistakes = {
        "unknown estimator 'rlo'; did you mean 'rloo'": ["--estimators", "rlo"],
        "--group-sizes 40: a group must have 2 to 32 trajectories": ["--group-sizes", "4,40"],
        "nowhere.jsonl": ["--problems", "nowhere.jsonl"],
        "a measurement needs at least 2 problems": ["--problems", "1"],
    }
    for message, wrong in mistakes.items():
        said = command_line.run("variance", *model, *wrong, code=2)
        assert message in said.replace("\n", " ")
        assert "Traceback" not in said
    assert not (command_line.folder / "variance").exists()
