"""The policy of the best evaluation is exported, kept whatever is pruned, and that of what the run still knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import WorldError
from agentrl.training.run.outputs import BestPolicyExport, best_evaluation

from .conftest import CommandLine


def scored(step: int, mean: float, *, falsified: bool = False) -> dict[str, Any]:
    return {"step": step, "mean": mean, "falsified": falsified}


def export(best: BestPolicyExport, step: int, mean: float) -> dict[str, Any]:
    """An export whose only file names its step."""
    evaluation = scored(step, mean)
    best.write_pending_export(evaluation, lambda folder: (folder / "weights").write_text(str(step)) and None)
    return evaluation


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_the_best_is_the_highest_and_the_earlier_of_equals() -> None:
    assert best_evaluation([]) is None
    assert best_evaluation([scored(4, 1.0, falsified=True)]) is None
    rows = [scored(0, 0.25), scored(2, 0.75), scored(4, 0.75), scored(4, 1.0, falsified=True), scored(6, 0.5)]
    assert best_evaluation(rows) == scored(2, 0.75)


def test_an_export_takes_its_place_once_its_evaluation_is_saved(checkpoints: Path) -> None:
    best = BestPolicyExport(checkpoints.parent)
    first = export(best, 0, 0.25)
    assert not best.path.exists()
    best.keep_only(first)
    assert best.contains(first)
    better = export(best, 5, 0.5)
    export(best, 6, 0.75)
    # A checkpoint is saved that knows of step 5 alone (a run that was killed and goes on from there).
    best.keep_only(better)
    assert names(checkpoints) == ["best"]
    assert (best.path / "weights").read_text() == "5"
    assert best.contains(better)
    assert not best.contains(first)
    assert not best.contains(None)


def test_what_a_resumed_run_no_longer_knows_is_removed(checkpoints: Path) -> None:
    best = BestPolicyExport(checkpoints.parent)
    first = export(best, 0, 0.25)
    best.keep_only(first)
    export(best, 5, 0.5)
    best.keep_only(first)  # killed before a checkpoint knew of step 5
    assert names(checkpoints) == ["best"]
    assert (best.path / "weights").read_text() == "0"
    best.keep_only(scored(3, 0.9))  # its export is gone: none is better than a wrong one
    assert names(checkpoints) == []
    best.keep_only(None)


def test_a_torn_export_is_no_export(checkpoints: Path) -> None:
    best = BestPolicyExport(checkpoints.parent)
    (checkpoints / ".best-000005.partial").mkdir()
    (checkpoints / ".best-000005.partial" / "weights").write_text("half")
    best.keep_only(scored(5, 0.5))
    assert names(checkpoints) == []

    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WorldError, match=r"best policy to .*best-000005.*No space left"):
        best.write_pending_export(scored(5, 0.5), fail)
    best.keep_only(scored(5, 0.5))
    assert names(checkpoints) == []


def test_the_summary_says_which_was_best_and_whether_its_policy_is_there(checkpoints: Path) -> None:
    best = BestPolicyExport(checkpoints.parent)
    assert best.best_record([]) is None
    evaluation = scored(5, 0.5) | {"k": 8}
    record = best.best_record([evaluation])
    assert record == evaluation | {"policy": None}
    assert (
        best.describe_best_record(record)
        == "best evaluation: step 5, avg@8 0.500; its policy was not kept (checkpoint.best)"
    )
    best.write_pending_export(evaluation, lambda folder: None)
    best.keep_only(evaluation)
    record = best.best_record([evaluation])
    assert record == evaluation | {"policy": "checkpoints/best"}
    said = f"best evaluation: step 5, avg@8 0.500; to evaluate its policy: agentrl eval --model {checkpoints / 'best'}"
    assert best.describe_best_record(record) == said


@pytest.mark.slow
def test_a_run_keeps_its_best_policy(command_line: CommandLine, random_policy: Path) -> None:
    # Two trajectories of two steps are an evaluation, twelve a training step: at step 2 the tally holds 57 to 60.
    run = command_line.folder / "runs" / "chosen"
    arguments = ["environment.kwargs.right=[50,70]", "evaluation.every=1", "checkpoint.every=1", "checkpoint.keep=3"]
    said = command_line.run(*command_line.counting(random_policy, "name=chosen", *arguments))
    best = "runs/chosen/checkpoints/best"
    assert f"best evaluation: step 2, avg@2 1.000; to evaluate its policy: agentrl eval --model {best}" in said
    assert names(run / "checkpoints") == ["best", "step-000002", "step-000003", "step-000004"]
    chosen = load_file(run / "checkpoints" / "best" / "model.safetensors")
    state = load_file(run / "checkpoints" / "step-000002" / "engine" / "part-00000.safetensors")
    (embedding,) = (value for name, value in state.items() if re.fullmatch(r"weight/.*embed_tokens\.weight", name))
    assert torch.equal(chosen["model.embed_tokens.weight"].flatten(), embedding.flatten())
    final = load_file(run / "policy" / "model.safetensors")
    assert not torch.equal(chosen["model.embed_tokens.weight"], final["model.embed_tokens.weight"])

    # A resumed run prunes what it likes; killed while it wrote a later export, it finds the one it has.
    (run / "checkpoints" / ".best-000005.partial").mkdir()
    command_line.run("train", "--resume", "name=chosen", "training.steps=5", "checkpoint.keep=1")
    assert names(run / "checkpoints") == ["best", "step-000005"]
    summary = json.loads((run / "summary.json").read_text())
    assert [score["mean"] for score in summary["scores"]] == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert summary["best"] == {**summary["scores"][2], "policy": "checkpoints/best"}
    assert json.loads((run / "checkpoints" / "best" / "best.json").read_text()) == summary["scores"][2]

    command_line.run("eval", "--model", "runs/chosen/checkpoints/best", "--n", "2", "--output", "again")
    evaluated = json.loads((command_line.folder / "again" / "results.json").read_text())
    assert evaluated["provenance"]["model"]["name"] == "runs/chosen/checkpoints/best"
