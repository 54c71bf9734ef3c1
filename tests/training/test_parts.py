"""What one rank saves at one ZeRO stage, two ranks at another go on with, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import finish, start_ranks
from torch import Tensor

from .parts_on_ranks import OTHER, Results

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("parts_on_ranks.py")
SAVED = [f"{ranks} {kind}" for ranks in (1, 2) for kind in OTHER]
WAYS = [(one, f"{ranks} {kind}") for one in SAVED for ranks in (1, 2) for kind in (one[2:], OTHER[one[2:]])]
FLOAT32 = [(one, other) for one, other in WAYS if not one.endswith("bfloat16")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("parts")
    found: dict[str, Results] = {}
    for phase in ("save", "load"):
        started = [start_ranks(SCRIPT, [folder / phase] * ranks) for ranks in (1, 2)]
        for processes in started:
            finish(processes, seconds=600)
        for ranks in (1, 2):
            found |= torch.load(folder / f"{phase}-{ranks}.pt")
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("saved", "loaded"), WAYS)
def test_every_bit_arrives_on_other_ranks_at_another_stage(
    results: dict[str, Results], saved: str, loaded: str
) -> None:
    assert_equal(results[saved]["state"], results[f"{saved} -> {loaded}"]["state"])


@pytest.mark.parametrize("saved", SAVED)
def test_the_same_ranks_go_on_bit_by_bit(results: dict[str, Results], saved: str) -> None:
    whole, resumed = results[saved], results[f"{saved} -> {saved}"]
    assert resumed["norms"] == whole["norms"]
    assert resumed["random"] == whole["random"]
    assert_equal(whole["end"], resumed["end"])
    assert not torch.equal(whole["end"]["first"], whole["state"]["first"])


@pytest.mark.parametrize(("saved", "loaded"), FLOAT32)
def test_other_ranks_go_on_alike_to_rounding(results: dict[str, Results], saved: str, loaded: str) -> None:
    whole, resumed = results[saved], results[f"{saved} -> {loaded}"]
    assert resumed["norms"] == pytest.approx(whole["norms"], rel=1e-5)
    torch.testing.assert_close(resumed["end"], whole["end"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["2 offload", "3 offload"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_offloading_changes_no_result(results: dict[str, Results], ranks: int, kind: str) -> None:
    plain, offloaded = results[f"{ranks} {kind[0]}"], results[f"{ranks} {kind}"]
    assert offloaded["norms"] == pytest.approx(plain["norms"], rel=1e-6)
    torch.testing.assert_close(offloaded["end"], plain["end"], rtol=1e-6, atol=1e-7)


def test_a_rank_that_was_not_there_draws_its_own_numbers(results: dict[str, Results]) -> None:
    drawn = results["1 2 -> 2 2"]["random"]
    assert drawn[0] == results["1 2"]["random"][0]
    assert drawn[1] not in (drawn[0], results["2 2"]["random"][1])
