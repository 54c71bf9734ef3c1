"""Rounded weights differ by at most half a step. The head and the embeddings are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollout.fakes import tiny_model
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.models.quantization import fake_quantize, round_weight


def test_a_weight_is_within_half_a_step_of_its_output() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    largest = weight.abs().amax(-1, keepdim=True)
    assert bool(((round_weight(weight, "int8") - weight).abs() <= largest / 254 * 1.001).all())
    # fp8 (e4m3) has three bits after the point, and steps of 2^-9 of 448 near zero.
    assert bool(((round_weight(weight, "fp8") - weight).abs() <= (weight.abs() / 16).clamp(min=1e-5) * 1.001).all())
    assert torch.equal(round_weight(torch.zeros(2, 3), "fp8"), torch.zeros(2, 3))


def test_linear_layers_except_the_head_are_rounded() -> None:
    model, before = tiny_model(), tiny_model().state_dict()
    changed = {
        name for name, value in fake_quantize(model, "int8").state_dict().items() if not value.equal(before[name])
    }
    assert changed == {name for name in before if name.endswith("proj.weight")}


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_have_a_scale_for_each_expert_and_output(transposed: bool) -> None:
    """Most families store [experts, out, in], and some [experts, in, out]."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    model: Any = (
        GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=3))
        if transposed
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=3, moe_intermediate_size=8))
    )
    experts = model.model.layers[0].mlp.experts
    assert experts.is_transposed == transposed
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fake_quantize(model, "int8")
    for name in ("gate_up_proj", "down_proj"):
        weight, now = before[f"model.layers.0.mlp.experts.{name}"], getattr(experts, name)
        wanted = [round_weight(one.T, "int8").T if transposed else round_weight(one, "int8") for one in weight]
        assert torch.equal(now, torch.stack(wanted))
        assert not torch.equal(now, weight)
    for name, value in model.state_dict().items():
        if name.endswith(("bias", "router.weight", "mlp.gate.weight", "norm.weight", "sinks")):
            assert torch.equal(value, before[name])
