"""A step in which memory runs out on one rank is repeated on all: the same step, in smaller micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
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
    "zero 3",
    "before the weights change",
)
IN_PARTS = (
    "in the training pass",
    "in the first of two updates",
    "in the second update",
    "in a selection",
    "in the critic",
    "zero 3, in the training pass",
)
REPLANNED_ON_TWO = (
    "zero 3, in the forward",
    "zero 3, checkpointed",
    "zero 3, offloaded",
    "zero 3, with a reference",
    "zero 3, in exact energies",
    "before they change, zero 3",
    "shared rows",
    "shared rows, in the forward",
    "shared rows, zero 3",
)
IN_PARTS_ON_TWO = ("zero 3, in the critic", "shared rows, in the training pass")


def ways(everywhere: Sequence[str], on_two: Sequence[str]) -> list[tuple[str, int]]:
    """Names of runs, and on how many ranks each."""
    return [(name, ranks) for ranks in (1, 2) for name in (*everywhere, *(on_two if ranks == 2 else ()))]


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


@pytest.mark.parametrize(("name", "ranks"), ways([*REPLANNED, *IN_PARTS], [*REPLANNED_ON_TWO, *IN_PARTS_ON_TWO]))
def test_memory_that_runs_out_changes_no_step(results: dict[int, Results], ranks: int, name: str) -> None:
    short, unhalved = results[ranks][name]["short"], results[ranks][name]["unhalved"]
    (told,) = short["told"]
    where = "outside micro-batches" if "change" in name else "in a micro-batch of "
    assert f"rank {ranks - 1} ran out of memory {where}" in told
    assert "training.micro_batch_tokens is 45 from now on instead of 90, and the step is repeated" in told
    assert short["tokens"] == 45
    assert unhalved["told"] == []
    assert distance(short, unhalved) < 1e-5
    for key, value in unhalved["metrics"].items():
        if not key.startswith("variance/head_exact"):  # needs whole groups, which no longer fit
            assert short["metrics"][key] == pytest.approx(value, rel=2e-5, abs=1e-6), key


@pytest.mark.parametrize(("name", "ranks"), ways([*REPLANNED, "dropout"], REPLANNED_ON_TWO))
def test_a_repeated_step_is_bitwise_that_of_smaller_micro_batches(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    short, halved = results[ranks][name]["short"], results[ranks][name]["halved"]
    assert torch.equal(short["delta"], halved["delta"])
    assert short["metrics"] == halved["metrics"]
    assert torch.equal(short["random"], halved["random"])


@pytest.mark.parametrize(("name", "ranks"), ways(IN_PARTS, IN_PARTS_ON_TWO))
def test_an_update_in_parts_is_the_update_of_smaller_micro_batches(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    assert distance(results[ranks][name]["short"], results[ranks][name]["halved"]) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one trajectory", "with one trajectory of "),
        ("one trajectory, zero 3", "with one trajectory of "),
        ("while the weights change", "in an update that had begun to change the weights"),
        ("while they change, zero 3", "in an update that had begun to change the weights"),
    ],
)
def test_what_smaller_micro_batches_cannot_mend_ends_the_run(
    results: dict[int, Results], name: str, why: str, ranks: int
) -> None:
    message = results[ranks][name]["message"]
    kind = "WorldError" if "change" in name else "SettingsError"
    assert message.startswith(f"{kind}: step 1 ran out of memory while training: on rank {ranks - 1}, {why}")
    assert "model.gradient_checkpointing=true" in message


def test_another_error_is_raised_as_it_is(results: dict[int, Results]) -> None:
    assert results[1]["another error"]["message"] == "raised"
