"""Over how many micro-batches, ranks and reductions an update is spread does not matter, also with offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import finish, start_ranks

from .accumulation_on_ranks import CLIP, COUNTS, OFFLOADS, STAGES

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("accumulation_on_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    """What one rank and two ranks found, run side by side."""
    folder = tmp_path_factory.mktemp("accumulation")
    started = {ranks: start_ranks(SCRIPT, [folder / f"{ranks}.pt"] * ranks, gpus=True) for ranks in (1, 2)}
    for processes in started.values():
        finish(processes, seconds=600)
    return {ranks: torch.load(folder / f"{ranks}.pt", map_location="cpu") for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", COUNTS)
def test_no_micro_batch_is_lost_in_rounding(
    results: dict[int, dict[Any, Any]], ranks: int, stage: int, count: int
) -> None:
    found = results[ranks][stage, count]
    norm = float(found["exact"].norm())
    assert norm > 2 * CLIP
    assert found["norm"] == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(found["gradient"], found["exact"] * CLIP / norm, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", OFFLOADS)
def test_several_reductions_a_backward_add_up(results: dict[int, dict[Any, Any]], ranks: int, kind: str) -> None:
    assert results[ranks][kind] == pytest.approx(results[1]["0 none"], rel=1e-5)


def test_ranks_whose_tokens_reach_different_experts_gather_the_same_weights(results: dict[int, dict[Any, Any]]) -> None:
    # Weights of zero let no gradient through to the layer below; expert r has x of rank r, over two ranks.
    assert results[2]["routed"] == pytest.approx((3**2 + 7**2) ** 0.5 / 2)
    assert results[2]["experts", 3] == pytest.approx(results[2]["experts", 0], rel=1e-5)
