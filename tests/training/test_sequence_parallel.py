"""A step whose rows several ranks share is the step of one rank: every ZeRO stage, every kind of estimator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import finish, start_ranks

from agentrl.training.engine.groups import grouping_obstacle

from .sequence_steps_on_ranks import NAMES, ON_FOUR
from .test_one_step import HEAD_EXACT, assert_same_step

SCRIPT = Path(__file__).with_name("sequence_steps_on_ranks.py")
WAYS = [(name, way) for name in NAMES for way in ("groups", "rows") if way == "groups" or name not in HEAD_EXACT]
"""The head-exact diagnostic takes whole groups."""
Results = dict[str, dict[str, Any]]


def results_of(counts: Sequence[int], folder: Path) -> dict[int, Results]:
    """What as many ranks made of the record, side by side."""
    started = {ranks: start_ranks(SCRIPT, [folder / f"{ranks}.pt"] * ranks) for ranks in counts}
    for processes in started.values():
        finish(processes, seconds=900)
    return {ranks: torch.load(folder / f"{ranks}.pt", weights_only=False) for ranks in counts}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    return results_of((1, 2), tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of((4,), tmp_path_factory.mktemp("four"))[4]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_two_ranks_that_share_rows_make_the_step_of_one(results: dict[int, Results], name: str, way: str) -> None:
    shared = results[2][f"{name}/2/{way}"]
    assert sum(shared["micro_batches"]) >= 3
    assert_same_step(results[1][name], shared)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, way in WAYS if name in ON_FOUR])
def test_so_do_two_pairs_and_four(results: dict[int, Results], four: Results, name: str, size: int, way: str) -> None:
    assert_same_step(results[1][name], four[f"{name}/{size}/{way}"])


@pytest.mark.slow
def test_a_single_group_is_shared(results: dict[int, Results]) -> None:
    assert_same_step(results[1]["one group"], results[2]["one group/2"])


def test_ranks_that_the_groups_do_not_divide_are_refused() -> None:
    assert [size for size in range(1, 8) if grouping_obstacle(size, ranks=6) is None] == [1, 2, 3, 6]
    assert grouping_obstacle(4, ranks=1) == (
        "training.sequence_parallel=4 does not divide the 1 training rank; valid: 1, or training.num_processes=4"
    )
    assert grouping_obstacle(4, ranks=6) == (
        "training.sequence_parallel=4 does not divide the 6 training ranks; valid: 1, 2, 3, 6, or "
        "training.num_processes=4 or 8"
    )
