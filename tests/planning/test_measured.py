"""The estimate against the bytes of a real step, counted one by one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from planning.support import setup, tiny_shape
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM

from agentrl.kernels.attention import pack_padded
from agentrl.models import loading
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.policy import PolicyModel
from agentrl.models.shape import ModelShape
from agentrl.planning.memory import TrainingSetup, rank_memory


@pytest.fixture
def live_bytes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("live_bytes")


def measured_peak(live_bytes: ModuleType, shape: ModelShape, how: TrainingSetup) -> int:
    """Bytes at the peak of two micro-batches and an AdamW step, in the second update."""
    torch.manual_seed(0)
    with live_bytes.LiveBytes() as counted:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.float32, attn_implementation="sdpa")
        if how.checkpointing:
            enable_gradient_checkpointing(model)
        policy = PolicyModel(model, backend="chunked").train()
        adamw = torch.optim.AdamW(policy.parameters(), fused=True)
        for _ in range(2):
            counted.restart()
            for _ in range(2):
                micro_batch(policy, shape, how.tokens)
            adamw.step()
            adamw.zero_grad()
        return counted.peak


def micro_batch(policy: PolicyModel, shape: ModelShape, tokens: int) -> None:
    ids = torch.randint(0, shape.vocabulary, (2, tokens // 2))
    lengths, mask = torch.ones(2, dtype=torch.int64), torch.ones(2, tokens // 2 - 1, dtype=torch.bool)
    statistics, _ = policy(*pack_padded(ids, lengths, mask))
    statistics.log_probs.sum().backward()


@pytest.mark.parametrize(
    ("kind", "more", "tokens", "checkpointing"),
    [
        ("qwen2", {}, 1024, False),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, 2048, True),
    ],
)
def test_the_estimate_is_within_15_percent_of_the_bytes_of_a_real_step(
    kind: str, more: dict[str, object], tokens: int, checkpointing: bool, live_bytes: ModuleType
) -> None:
    shape = tiny_shape(kind, **more)
    how = setup(ranks=1, stage=0, bfloat16=False, tokens=tokens, checkpointing=checkpointing)
    assert rank_memory(shape, how).total == pytest.approx(measured_peak(live_bytes, shape, how), rel=0.15)


def test_what_waits_in_the_hosts_memory_is_what_a_real_forward_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    plain = loading.save_on_cpu

    def watched(**options: bool) -> save_on_cpu:
        context = plain(**options)
        pack = context.pack_hook
        context.pack_hook = lambda tensor: (moved.append(tensor.nbytes), pack(tensor))[1]
        return context

    monkeypatch.setattr(loading, "save_on_cpu", watched)
    shape = tiny_shape()
    model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.float32)
    enable_gradient_checkpointing(model)
    loading.offload_checkpoints_to_host(model.get_decoder())
    model.train().get_decoder()(input_ids=torch.zeros(1, 1024, dtype=torch.int64), use_cache=False)
    how = setup(ranks=1, stage=0, bfloat16=False, checkpointing=True, checkpoint_offload=True)
    assert rank_memory(shape, how).host == pytest.approx(sum(moved), rel=0.01)


def test_a_storage_counts_once_and_until_its_last_view_is_gone(live_bytes: ModuleType) -> None:
    before = torch.ones(1000)
    with live_bytes.LiveBytes() as counted:
        counted.leave_out([before])
        view = before.view(10, 100)
        own = view + 1
        other = own[:5]
        assert counted.live == 4000
        del own
        assert counted.live == 4000
        del other
        assert (counted.live, counted.peak) == (0, 4000)
