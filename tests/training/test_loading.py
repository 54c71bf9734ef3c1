"""Reading a policy at ZeRO-3: every rank holds its shard, and trains as from a whole copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.architectures import build_tiny
from ranks import finish, start_ranks

from agentrl.models.loading import read_model
from agentrl.models.settings import ModelSettings

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("loading_on_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Any]:
    """(what each of two ranks found, the policy read plainly)."""
    folder = tmp_path_factory.mktemp("loading")
    model = build_tiny("gemma2", tie_word_embeddings=True, attention_dropout=0.3)
    model.generation_config.top_k = 7
    model.generation_config.do_sample = True
    model.save_pretrained(folder / "policy")
    outputs = [folder / f"{rank}.pt" for rank in range(2)]
    finish(start_ranks(SCRIPT, outputs), seconds=600)
    plain = read_model(folder / "policy", ModelSettings(dtype="float32"))
    return [torch.load(output) for output in outputs], plain


def test_a_rank_holds_its_shard_and_nothing_else(found: tuple[list[Any], Any]) -> None:
    ranks, plain = found
    for result in ranks:
        assert result["all"] == sum(item.numel() for item in plain.parameters())
        assert result["held"] == 0
        assert result["all"] / 2 <= result["shard"] < result["all"] * 0.51  # padded to equal parts
        assert result["modes"] == [0.0, True]
        assert result["tied"]


def test_what_is_read_is_what_a_plain_reading_gives(found: tuple[list[Any], Any]) -> None:
    ranks, plain = found
    for result in ranks:
        assert result["read"].keys() == dict(plain.named_parameters()).keys()
        assert all(torch.equal(result["read"][name], value) for name, value in plain.named_parameters())
        buffers = dict(plain.named_buffers())
        assert result["buffers"].keys() == buffers.keys()
        assert all(torch.equal(result["buffers"][name], value) for name, value in buffers.items())
        assert all(result["buffers"][name].dtype == value.dtype for name, value in buffers.items())
        assert result["generation"]["top_k"] == 7
        half = read_model(plain.name_or_path, ModelSettings(dtype="bfloat16"))
        values = dict(half.named_parameters()) | dict(half.named_buffers())
        torch.testing.assert_close(result["half"], values, rtol=0, atol=0)


def test_policy_critic_and_reference_are_those_of_whole_copies(found: tuple[list[Any], Any]) -> None:
    ranks, plain = found
    for result in ranks:
        sharded, whole = result["sharded"], result["plain"]
        torch.testing.assert_close(sharded, whole, rtol=0, atol=0)
        moved = [name for name, value in plain.named_parameters() if not torch.equal(sharded["trained"][name], value)]
        assert len(moved) == len(list(plain.parameters()))
