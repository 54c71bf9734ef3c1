from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from agentrl.weights.exports import copy_to_host, read_weights, write_weights
from agentrl.weights.sources import full_parameters, gathered_linear


class Tied(nn.Module):
    """An embedding and a head of one weight, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def test_tied_parameters_come_once_and_share_memory() -> None:
    module = Tied()
    given = dict(full_parameters(module))
    assert list(given) == ["embedding.weight", "head.bias"]
    assert given["embedding.weight"].data_ptr() == module.head.weight.data_ptr()
    assert not given["embedding.weight"].requires_grad


def test_a_head_gives_weight_and_bias() -> None:
    module = Tied()
    with gathered_linear(module.head) as (weight, bias):
        assert torch.equal(weight, module.head.weight)
        assert bias is not None
        assert torch.equal(bias, module.head.bias)
    with gathered_linear(nn.Linear(2, 2, bias=False)) as (_, bias):
        assert bias is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_brings_back_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "new" / "policy.safetensors"
    sent = {"a": torch.randn(3, 4).to(dtype), "b": torch.randn(4, 3).to(dtype).t()}
    write_weights(path, {name: copy_to_host(tensor) for name, tensor in sent.items()})
    read = dict(read_weights(path))
    assert read.keys() == sent.keys()
    assert all(torch.equal(read[name], sent[name]) for name in sent)
    assert [item.name for item in path.parent.iterdir()] == ["policy.safetensors"]


def test_later_weights_replace_earlier_ones_whole(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    write_weights(path, {"a": torch.zeros(2)})
    opened = read_weights(path)
    name, value = next(opened)
    write_weights(path, {"a": torch.ones(2)})
    assert (name, value.tolist()) == ("a", [0.0, 0.0])
    assert dict(read_weights(path))["a"].tolist() == [1.0, 1.0]
