"""Rounded weights differ by at most half a step. The head and the embeddings are unchanged."""

from __future__ import annotations

import torch
from rollout.fakes import tiny_model

from agentrl.models.quantization import fake_quantize, rounded


def test_a_weight_is_within_half_a_step_of_its_output() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    largest = weight.abs().amax(-1, keepdim=True)
    assert bool(((rounded(weight, "int8") - weight).abs() <= largest / 254 * 1.001).all())
    # fp8 (e4m3) has three bits after the point, and steps of 2^-9 of 448 near zero.
    assert bool(((rounded(weight, "fp8") - weight).abs() <= (weight.abs() / 16).clamp(min=1e-5) * 1.001).all())
    assert torch.equal(rounded(torch.zeros(2, 3), "fp8"), torch.zeros(2, 3))


def test_linear_layers_except_the_head_are_rounded() -> None:
    model, before = tiny_model(), tiny_model().state_dict()
    changed = {
        name for name, value in fake_quantize(model, "int8").state_dict().items() if not value.equal(before[name])
    }
    assert changed == {name for name in before if name.endswith("proj.weight")}
