"""Adapters under every ZeRO stage, on one rank and on two: the same training, over a model that never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import finish, start_ranks

from agentrl.models.lora import is_adapter_factor, name_without_adapter

from .energies_on_ranks import batch, make_model

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
STEPS = 4
SCRIPT = Path(__file__).with_name("adapters_on_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, Any]]:
    """What one rank and two ranks found, by ranks and stage."""
    folder = tmp_path_factory.mktemp("adapters")
    started = {ranks: start_ranks(SCRIPT, [folder / f"{ranks}.pt"] * ranks) for ranks in (1, 2)}
    for processes in started.values():
        finish(processes, seconds=600)
    return {ranks: torch.load(folder / f"{ranks}.pt") for ranks in (1, 2)}


@pytest.fixture(scope="module")
def base() -> Any:
    return make_model(tied=True, kind="qwen3")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
class TestAdapters:
    def test_the_model_under_them_stays_bitwise_as_it_was(
        self, results: dict[int, dict[int, Any]], base: Any, stage: int, ranks: int
    ) -> None:
        frozen = {name_without_adapter(name): value for name, value in results[ranks][stage]["frozen"].items()}
        assert frozen.keys() == dict(base.named_parameters()).keys()
        assert all(torch.equal(frozen[name], value) for name, value in base.named_parameters())

    def test_every_one_of_them_learns_as_on_one_rank_without_zero(
        self, results: dict[int, dict[int, Any]], base: Any, stage: int, ranks: int
    ) -> None:
        found, plain = results[ranks][stage], results[1][0]
        for name, value in found["adapter"].items():
            assert value.abs().max() > 0, name
            torch.testing.assert_close(value, plain["adapter"][name], rtol=1e-3, atol=1e-6)
        moved = [name for name, value in base.named_parameters() if not torch.equal(found["merged"][name], value)]
        assert len(moved) == 2 * 7

    def test_a_checkpoint_resumes_to_the_same_and_leaves_the_model_out(
        self, results: dict[int, dict[int, Any]], base: Any, stage: int, ranks: int
    ) -> None:
        found = results[ranks][stage]
        assert all(is_adapter_factor(name) for name in found["saved"])
        assert all(torch.equal(value, found["resumed"][name]) for name, value in found["adapter"].items())

    def test_the_reference_is_the_model_itself_at_every_step(
        self, results: dict[int, dict[int, Any]], base: Any, stage: int, ranks: int
    ) -> None:
        ids, lengths, mask = batch()
        with torch.no_grad():
            log_p = torch.log_softmax(base(input_ids=ids).logits, dim=-1)
        rows, columns = mask.nonzero(as_tuple=True)
        own = log_p[rows, lengths[rows] + columns - 1, ids[rows, lengths[rows] + columns]]
        assert len(results[ranks][stage]["reference"]) == STEPS
        for scores in results[ranks][stage]["reference"]:
            torch.testing.assert_close(scores[rows, columns], own, rtol=1e-4, atol=1e-5)
