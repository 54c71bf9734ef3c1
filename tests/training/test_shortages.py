"""A step in which memory runs out on one rank is repeated on all: the same step, in smaller micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import finish, start_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("shortage_on_ranks.py")
Results = dict[str, dict[str, Any]]
REPLANNED = (
    "alone in one forward",
    "one forward, zero 1",
    "one forward, zero 2",
    "in the forward",
    "offloaded",
    "in the statistics pass",
)
IN_PARTS = (
    "in the training pass",
    "in the first of two updates",
    "in the second update",
    "in a selection",
    "in the critic",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """What one rank and what two ranks made of the record, run side by side."""
    folder = tmp_path_factory.mktemp("shortages")
    started = {ranks: start_ranks(SCRIPT, [folder / f"{ranks}.pt"] * ranks) for ranks in (1, 2)}
    for processes in started.values():
        finish(processes, seconds=900)
    return {ranks: torch.load(folder / f"{ranks}.pt", weights_only=False) for ranks in started}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((one["delta"] - other["delta"]).norm() / other["delta"].norm())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [*REPLANNED, *IN_PARTS])
def test_memory_that_runs_out_changes_no_step(results: dict[int, Results], ranks: int, name: str) -> None:
    short, unhalved = results[ranks][name]["short"], results[ranks][name]["unhalved"]
    (told,) = short["told"]
    assert f"rank {ranks - 1} ran out of memory in a micro-batch of " in told
    assert "training.micro_batch_tokens is 45 from now on instead of 90, and the step is repeated" in told
    assert short["tokens"] == 45
    assert unhalved["told"] == []
    assert distance(short, unhalved) < 1e-5
    for key, value in unhalved["metrics"].items():
        if not key.startswith("variance/head_exact"):  # needs whole groups, which no longer fit
            assert short["metrics"][key] == pytest.approx(value, rel=2e-5, abs=1e-6), key


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [*REPLANNED, "dropout"])
def test_a_repeated_step_is_bitwise_that_of_smaller_micro_batches(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    short, halved = results[ranks][name]["short"], results[ranks][name]["halved"]
    assert torch.equal(short["delta"], halved["delta"])
    assert short["metrics"] == halved["metrics"]
    assert torch.equal(short["random"], halved["random"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", IN_PARTS)
def test_an_update_in_parts_is_the_update_of_smaller_micro_batches(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    assert distance(results[ranks][name]["short"], results[ranks][name]["halved"]) < 1e-5


@pytest.mark.parametrize("name", ["one forward, zero 2", "in the training pass", "in the critic"])
def test_a_rank_leaves_out_the_reductions_that_were_done(results: dict[int, Results], name: str) -> None:
    assert results[2][name]["short"]["left_out"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_trajectory_that_does_not_fit_ends_the_run(results: dict[int, Results], ranks: int) -> None:
    message = str(results[ranks]["hopeless"])
    assert message.startswith(f"step 1 ran out of memory while training: on rank {ranks - 1}, with one trajectory of ")
    assert "model.gradient_checkpointing=true" in message


def test_another_error_is_raised_as_it_is(results: dict[int, Results]) -> None:
    assert results[1]["another error"] == "raised"
