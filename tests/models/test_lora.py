"""Adapters: which layers get one, that each counts, that the model under them never changes, and exact energies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.kernels.attention import pack_padded
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.lora import add_adapters, disabled_adapters, is_adapter_factor, write_adapter
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import LoRASettings
from agentrl.weights.exports import AdapterSource, MergedSource, adapter_parameters, merged_parameters
from agentrl.weights.sources import full_parameters

from .architectures import build_tiny

KINDS = ("qwen2", "qwen3", "llama", "gemma2")
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
RANK = LoRASettings(rank=4)


def adapted(kind: str = "qwen2", settings: LoRASettings = RANK, **more: Any) -> Any:
    """A tiny model with adapters whose factors are both random."""
    model = add_adapters(build_tiny(kind, **more), settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if is_adapter_factor(name):
                value.copy_(torch.randn(value.shape, generator=draw) / 10)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """(input_ids [3, 14], prompt_lengths [3], response_mask [3, 9])."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 250, (3, 14), generator=draw)
    lengths = torch.tensor([3, 5, 2])
    mask = torch.rand(3, 9, generator=draw) < 0.6
    mask[:, 0] = True
    return ids, lengths, mask


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(input_ids=batch()[0]).logits
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_but_the_head_gets_an_adapter_that_starts_as_nothing(kind: str) -> None:
    plain = build_tiny(kind)
    before = {name: value.clone() for name, value in plain.named_parameters()}
    start = logits(plain)
    model = add_adapters(plain, RANK)
    assert torch.equal(logits(model), start)
    learning = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in learning} == LAYERS
    assert len(learning) == 2 * 7 * 2  # factors, layers of a block, blocks
    # The same names and values are there without them.
    assert dict(merged_parameters(model, RANK)).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in merged_parameters(model, RANK))


def test_the_start_is_the_same_everywhere_and_no_other_random_number_moves() -> None:
    one = add_adapters(build_tiny("qwen2"), RANK)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(9))
    torch.manual_seed(9)
    other = add_adapters(build_tiny("qwen2", seed=9), RANK)
    torch.manual_seed(9)
    add_adapters(other, LoRASettings())
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    both = [dict(adapter_parameters(model)) for model in (one, other)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


@pytest.mark.parametrize("layer", sorted(LAYERS))
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_each_factor_of_each_kind_of_layer_counts_alone(layer: str, factor: str) -> None:
    model = adapted()
    start = logits(model)
    whole = {name: value.clone() for name, value in merged_parameters(model, RANK)}
    with torch.no_grad():
        model.get_parameter(_path(model, layer, factor)).mul_(1.5)
    assert (logits(model) - start).abs().max() > 1e-4
    changed = {name for name, value in merged_parameters(model, RANK) if not torch.equal(value, whole[name])}
    assert len(changed) == 1
    assert layer in changed.pop()


def _path(model: Any, layer: str, factor: str) -> str:
    """The name of a factor in the last block."""
    return [name for name, _ in model.named_parameters() if f".{layer}.{factor}." in name][-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_the_adapted_one(kind: str) -> None:
    model = adapted(kind)
    other = build_tiny(kind, seed=7)
    other.load_state_dict(dict(merged_parameters(model, RANK)), strict=False)
    other.tie_weights()
    assert (logits(model) - logits(build_tiny(kind))).abs().max() > 1e-2
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-5)


def test_with_the_adapter_off_the_model_is_bitwise_its_own() -> None:
    model, base = adapted(), build_tiny("qwen2")
    trained = logits(model)
    with disabled_adapters(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), trained)
    assert not torch.equal(trained, logits(base))


def test_what_is_written_is_what_peft_reads(tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted()
    write_adapter(tmp_path / "adapter", dict(adapter_parameters(model)), RANK, base="a-model")
    read = PeftModel.from_pretrained(build_tiny("qwen2"), tmp_path / "adapter").eval()
    assert torch.equal(logits(read), logits(model))
    assert read.peft_config["default"].base_model_name_or_path == "a-model"


def test_sources_say_what_they_yield() -> None:
    model = adapted()
    sources = MergedSource(model, RANK), AdapterSource(model)
    for source in sources:
        shapes = [(item.name, item.shape) for item in source.shapes()]
        assert [(name, tuple(value.shape)) for name, value in source] == shapes
    merged, alone = (source.checksums for source in sources)
    base = dict(full_parameters(build_tiny("qwen2")))
    assert merged.keys() == {*base, "lm_head.weight"}
    assert {name for name in merged if merged[name] == alone[name]} == {
        name for name in merged if not any(layer in name and "weight" in name for layer in LAYERS)
    }
    assert len(alone) == len(merged) + 28


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_exact_energies_are_those_of_the_adapters(kind: str, checkpointed: bool) -> None:
    model = adapted(kind)
    if checkpointed:
        enable_gradient_checkpointing(model)
        model.train()
    policy = PolicyModel(model)
    ids, lengths, mask = batch()
    found = policy.trajectory_energies(ids, lengths, mask, temperature=0.8)
    learning = [value for value in model.parameters() if value.requires_grad]
    for row in range(len(ids)):
        own = slice(row, row + 1)
        statistics, _ = policy(*pack_padded(ids[own], lengths[own], mask[own]), temperature=0.8)
        gradients = torch.autograd.grad(statistics.log_probs.sum(), learning)
        expected = sum(item.double().square().sum() for item in gradients)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "gate"], "no linear layer of Qwen2ForCausalLM has a name that ends in gate; valid: q_proj, k_proj"),
        (["lm_head"], "lm_head is the model's head, which cannot have an adapter"),
        (["embed_tokens"], "ends in embed_tokens; valid: q_proj"),
    ],
)
def test_targets_that_cannot_be(targets: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        add_adapters(build_tiny("qwen2"), LoRASettings(rank=2, targets=targets))


def test_targets_choose_the_layers() -> None:
    model = add_adapters(build_tiny("qwen2"), LoRASettings(rank=2, targets=["q_proj", "1.mlp.up_proj"]))
    names = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
