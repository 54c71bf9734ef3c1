"""Rows that two ranks and four ranks share, against the same rows on one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.gpu_attention import stand_in
from models.architectures import build_tiny
from models.sequence_on_ranks import CASES, batch_of, found_by
from ranks import finish, start_ranks

from agentrl.errors import SettingsError
from agentrl.models.attention import reason_sequence_parallel_unsupported, use_attention_backend

SCRIPT = Path(__file__).with_name("sequence_on_ranks.py")
RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    """What the ranks computed in groups of two and together."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = [folder / f"{rank}.pt" for rank in range(RANKS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SCRIPT.parents[1]), prepend=os.pathsep)
        ranks = start_ranks(SCRIPT, outputs)
    finish(ranks, seconds=300)
    return [torch.load(output) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_shared_rows_give_what_whole_rows_give(
    results: list[dict[int, dict[str, Any]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    alone = found_by(CASES[name], None)
    gradients = alone.pop("gradients")
    learns = alone.pop("learns")
    assert learns == ["log_probs", "entropy", "full_kl", "teacher_divergence"]
    for rank in results:
        for found in (rank[2][name], rank[4][name]):
            assert found["learns"] == learns
            assert found.keys() == {*alone, "learns", "gradients"}
            for field, value in alone.items():
                torch.testing.assert_close(found[field], value, rtol=1e-6, atol=1e-7, msg=field)
            assert found["gradients"].keys() == gradients.keys()
            for parameter, value in gradients.items():
                distance = float((found["gradients"][parameter] - value).norm())
                assert distance <= 1e-6 * float(value.norm()) + 1e-9, parameter


@pytest.mark.slow
def test_every_rank_has_the_same_numbers(results: list[dict[int, dict[str, Any]]]) -> None:
    for name in CASES:
        for field in ("log_probs", "entropy", "energy", "values"):
            assert all(torch.equal(results[0][4][name][field], rank[4][name][field]) for rank in results)


def test_the_compared_rows_are_trees() -> None:
    """Also with adapters: three documents share a prompt, and one prompt continues the response of another document."""
    row = batch_of(CASES["adapters"], ranks=2).row
    assert row.continued_segments.tolist() == [0, 0, 1, 2, 2, 1, 1, 0, 8]  # 8: padding to a multiple of the ranks


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    model = build_tiny("qwen2", num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    with pytest.raises(SettingsError) as failure:
        use_attention_backend(model, "sdpa", ranks=4)
    assert str(failure.value) == (
        "training.sequence_parallel=4 does not divide the model's 6 query heads; valid: 1, 2, 3, 6"
    )
    with pytest.raises(SettingsError, match=r"training\.sequence_parallel needs packed trajectories"):
        use_attention_backend(model, "padded", ranks=2)
    reasons = {ranks: reason_sequence_parallel_unsupported(model.config, ranks) for ranks in range(1, 9)}
    assert [ranks for ranks, reason in reasons.items() if reason is None] == [1, 2, 3, 6]
