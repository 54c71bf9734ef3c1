"""Rows go to the rank that holds their group, whole and without padding, and what is made of them comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import finish, start_ranks

from .exchange_on_ranks import LENGTHS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("exchange_on_ranks.py")
GROUPS = len(LENGTHS) // 3


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank held."""
    output = tmp_path_factory.mktemp("exchange") / "result"
    finish(start_ranks(SCRIPT, [output] * request.param), seconds=300)
    return [torch.load(f"{output}.{rank}") for rank in range(request.param)]


@pytest.mark.parametrize("name", ["groups", "one rank"])
def test_each_group_meets_whole_on_one_rank(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(ranks):
        held = result[name]["held"]
        last = len(ranks) - 1
        groups = [group for group in range(GROUPS) if (group % len(ranks) if name == "groups" else last) == rank]
        assert sorted(held["numbers"].tolist()) == [row for group in groups for row in range(3 * group, 3 * group + 3)]
        assert held["nothing"] is None
        for row, tokens, mask in zip(held["numbers"].tolist(), held["tokens"], held["mask"], strict=True):
            assert tokens[: LENGTHS[row]].tolist() == [100 * row + place for place in range(LENGTHS[row])]
            assert tokens[LENGTHS[row] :].eq(0).all()
            assert mask.nonzero().flatten().tolist() == sorted({0, LENGTHS[row] - 1})
        # No wider than what is held.
        assert held["tokens"].shape[1] == max((LENGTHS[row] for row in held["numbers"].tolist()), default=1)


@pytest.mark.parametrize("name", ["groups", "one rank"])
def test_results_come_back_to_where_the_rows_are(ranks: list[dict[str, Any]], name: str) -> None:
    for result in ranks:
        for sent, back in zip(result[name]["sent"], result[name]["back"], strict=True):
            torch.testing.assert_close(back, 2 * sent.nan_to_num(0.0), rtol=0.0, atol=0.0)
        assert result[name]["spare"] == [0, 0, 0]  # no part keeps the memory of another alive
