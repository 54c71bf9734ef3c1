"""Two forwards in training are the same, whatever a model's configuration says of dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.architectures import write_tiny
from transformers import AutoConfig

from agentrl.models.loading import disable_dropout, read_model
from agentrl.models.settings import ModelSettings

IDS = torch.tensor([[5, 9, 2, 77, 31, 8]])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "dropout"),
    [
        ("qwen2", {"attention_dropout": 0.1}),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
        ("gpt_neox", {"attention_dropout": 0.2, "hidden_dropout": 0.2}),
        ("opt", {"dropout": 0.2, "attention_dropout": 0.2, "layerdrop": 0.5}),
    ],
)
def test_two_forwards_in_training_are_bitwise_equal(
    kind: str, dropout: dict[str, float], checkpointing: bool, tmp_path: Path
) -> None:
    write_tiny(tmp_path, kind, **dropout)
    settings = ModelSettings(dtype="float32", gradient_checkpointing=checkpointing)
    model = read_model(tmp_path, settings).train()
    results = []
    for _ in range(2):
        model.zero_grad()
        logits = model(input_ids=IDS, use_cache=False).logits
        logits.square().sum().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    model.eval()
    assert torch.equal(results[0][0], model(input_ids=IDS, use_cache=False).logits)
    left = {name: getattr(model.config, name) for name in dropout}
    assert left == dict.fromkeys(dropout, 0.0)


def test_probabilities_in_parts_of_a_configuration_are_cleared_too() -> None:
    text = {"attention_dropout": 0.3, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config=text)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.noise = torch.nn.AlphaDropout(0.4)
            self.router_jitter_noise = 0.01

    whole = Whole()
    disable_dropout(whole)
    assert (config.text_config.attention_dropout, whole.noise.p, whole.router_jitter_noise) == (0.0, 0.0, 0.0)
