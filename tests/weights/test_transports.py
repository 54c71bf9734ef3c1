from __future__ import annotations

import torch
from torch import nn

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
