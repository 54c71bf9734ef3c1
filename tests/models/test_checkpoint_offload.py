"""``model.checkpoint_offload``: inputs of checkpointed layers wait in host memory, and no bit of a gradient changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.cases import seeded
from pydantic import ValidationError
from torch import Tensor

from agentrl.kernels.attention import pack_padded
from agentrl.models import loading
from agentrl.models.loading import read_model
from agentrl.models.lora import add_adapters
from agentrl.models.policy import PolicyModel, ValueModel
from agentrl.models.settings import LoRASettings, ModelSettings

pytestmark = pytest.mark.on_device

LAYERS, WIDTH = 3, 16
LENGTHS, PROMPTS = (9, 14, 6), (3, 3, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that go to host memory."""
    found: list[Tensor] = []
    plain = loading.save_on_cpu

    def watched(**options: Any) -> Any:
        context = plain(**options)
        pack = context.pack_hook
        context.pack_hook = lambda tensor: (found.append(tensor), pack(tensor))[1]
        return context

    monkeypatch.setattr(loading, "save_on_cpu", watched)
    return found


def model(folder: Path, *, offload: bool, checkpointing: bool = True, lora: int = 0) -> Any:
    settings = ModelSettings(dtype="float32", gradient_checkpointing=checkpointing, checkpoint_offload=offload)
    torch.manual_seed(1)
    with torch.device("cpu"):  # transformers reads onto another default device only with accelerate
        read = add_adapters(read_model(folder, settings), LoRASettings(rank=lora))
    return read.to(torch.get_default_device()).train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 40, (len(LENGTHS), max(LENGTHS)), generator=seeded(2))
    ids[1, : PROMPTS[1]] = ids[0, : PROMPTS[0]]  # one prompt, which is read once
    prompts = torch.tensor(PROMPTS)
    return ids, prompts, torch.tensor(LENGTHS) - prompts


def gradients(causal_lm: Any, *, critic: bool = False) -> list[Tensor]:
    ids, prompts, responses = batch()
    longest = int(responses.max())
    packed = pack_padded(ids, prompts, torch.arange(longest) < responses[:, None])
    if critic:
        value = ValueModel(causal_lm).to(torch.get_default_device())
        torch.nn.init.ones_(value.value_head.weight)
        value(packed[0], longest).square().sum().backward()
    else:
        found, _ = PolicyModel(causal_lm)(*packed)
        (found.log_probs.sum() + found.entropy.sum()).backward()
    return [item.grad for item in causal_lm.parameters() if item.grad is not None]


@pytest.mark.parametrize(("critic", "lora"), [(False, 0), (True, 0), (False, 2)])
def test_no_bit_of_a_gradient_changes(folder: Path, moved: list[Tensor], critic: bool, lora: int) -> None:
    plain = gradients(model(folder, offload=False, lora=lora), critic=critic)
    assert moved == []
    offloaded = gradients(model(folder, offload=True, lora=lora), critic=critic)
    assert len(plain) == len(offloaded) > LAYERS
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    tokens = sum(LENGTHS) - PROMPTS[1]
    inputs = [item for item in moved if item.shape == (1, tokens, WIDTH)]
    assert len(inputs) >= LAYERS  # of each layer, and what the last norm keeps
    assert sum(item.numel() for item in moved) < (LAYERS + 5) * tokens * WIDTH  # and nothing from inside a layer


def test_energies_are_the_same(folder: Path) -> None:
    ids, prompts, responses = batch()
    mask = torch.arange(int(responses.max())) < responses[:, None]
    found = [
        PolicyModel(model(folder, offload=offload)).trajectory_energies(ids, prompts, mask) for offload in (False, True)
    ]
    assert torch.equal(*found)


def test_nothing_is_left_after_a_forward_that_failed(folder: Path, moved: list[Tensor]) -> None:
    causal_lm = model(folder, offload=True)

    def fail(*_: object) -> None:
        raise MemoryError

    handle = causal_lm.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        gradients(causal_lm)
    handle.remove()
    moved.clear()
    (torch.ones(3, requires_grad=True) * torch.ones(3, requires_grad=True)).sum().backward()
    assert moved == []


def test_it_needs_checkpoints() -> None:
    with pytest.raises(ValidationError, match="checkpoint_offload=true requires gradient checkpointing"):
        ModelSettings(checkpoint_offload=True)
