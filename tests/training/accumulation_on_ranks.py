"""Gradients over many micro-batches, on as many ranks as the environment says: ``OUTPUT``.

Run by test_accumulation.py in processes of its own; rank 0 writes what came out, by ZeRO stage and micro-batches, and
the norms of a model whose gradients fill several of DeepSpeed's reduction buckets, by stage and offload.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.kernels.attention import pack_padded
from agentrl.models.policy import PolicyModel
from agentrl.training.engine import deepspeed_engine
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings

STAGES = (0, 1, 2, 3)
COUNTS = (1, 8, 64, 512)
CLIP = 0.5
OFFLOADS = ("0 none", "1 optimizer", "2 none", "2 optimizer", "3 optimizer", "3 all")
BUCKET = 1000  # elements; the model has 7,000


class Products(nn.Module):
    """The sum of ``weight * x``: its gradient is ``x``, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def accumulate(stage: int, micro_batches: int) -> dict[str, Any]:
    """One update: its norm, the gradient that the optimizer saw, and the sum of all micro-batches' in float64."""
    module = Products()
    engine = TrainingEngine(
        module,
        optimizer=OptimizerSettings(gradient_clip=CLIP, weight_decay=0.0, betas=(0.5, 0.99)),
        training=TrainingSettings(zero_stage=stage, persistence_threshold=0),
        bfloat16=True,
        updates=1,
    )
    draw = torch.Generator().manual_seed(micro_batches)
    # Nearly equal terms of one sign: what is lost adds up. Powers of two divide without rounding.
    every = (1 + torch.rand(micro_batches, engine.world_size, 3, 5, generator=draw) / 8).to(torch.bfloat16)
    every /= micro_batches * engine.world_size
    for terms in every:
        engine.backward(engine(terms[engine.rank].to(engine.device)) * engine.world_size)
    norm = engine.step()
    return {
        "norm": norm,
        "gradient": 2 * safe_get_full_optimizer_state(module.weight, "exp_avg").double(),
        "exact": every.double().sum((0, 1)),
    }


def policy() -> PolicyModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return PolicyModel(Qwen2ForCausalLM(Qwen2Config(vocab_size=100, num_key_value_heads=1, **sizes)))


def norms(kind: str) -> list[float]:
    """The gradient norms of two updates over three micro-batches each, the same on every rank."""
    stage, offload = kind.split()
    engine = TrainingEngine(
        policy(),
        optimizer=OptimizerSettings(learning_rate=0.01),
        training=TrainingSettings(zero_stage=int(stage), persistence_threshold=0, offload=offload),
        bfloat16=False,
        updates=2,
    )
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        for ids in torch.randint(0, 100, (3, 2, 12), generator=draw):
            inputs = pack_padded(ids, torch.tensor([4, 4]), torch.ones(2, 8, dtype=torch.bool))
            statistics, _ = engine(*(one.to(engine.device) for one in inputs))
            engine.backward(-statistics.log_probs.mean())
        found.append(float(engine.step()))
    return found


class Routed(nn.Module):
    """Two experts: the tokens of each rank reach its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[torch.distributed.get_rank()](x)


def routed() -> float:
    """The gradient norm of :class:`Routed` at ZeRO 3, below a layer that passes its input on."""
    module = nn.Sequential(nn.Linear(3, 3, bias=False), Routed())
    for parameter, value in zip(module.parameters(), (torch.eye(3), torch.zeros(1, 3), torch.zeros(1, 3)), strict=True):
        parameter.data = value
    engine = TrainingEngine(
        module,
        optimizer=OptimizerSettings(gradient_clip=1e9),
        training=TrainingSettings(zero_stage=3, persistence_threshold=0),
        bfloat16=False,
        updates=1,
    )
    inputs = torch.tensor([[1.0, 2.0, 2.0], [2.0, 3.0, 6.0]])  # of norms 3 and 7
    engine.backward(engine(inputs[engine.rank].to(engine.device)).sum())
    return engine.step()


def experts(stage: int) -> list[float]:
    """The gradient norms of two updates of a Qwen3-MoE, on other tokens in each rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 8}
    engine = TrainingEngine(
        PolicyModel(Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=100, num_experts_per_tok=1, **sizes))),
        optimizer=OptimizerSettings(learning_rate=0.01),
        training=TrainingSettings(zero_stage=stage, persistence_threshold=0),
        bfloat16=False,
        updates=2,
    )
    draw = torch.Generator().manual_seed(1)
    found = []
    for every in torch.randint(0, 100, (2, 2, 1, 5), generator=draw):
        ids = every[engine.rank]
        inputs = pack_padded(ids, torch.tensor([2]), torch.ones(1, 3, dtype=torch.bool))
        statistics, _ = engine(*(one.to(engine.device) for one in inputs))
        engine.backward(-statistics.log_probs.mean())
        found.append(float(engine.step()))
    return found


def with_small_buckets(*given: Any, **named: Any) -> dict[str, Any]:
    config = _plain_config(*given, **named)
    config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    return config


_plain_config = deepspeed_engine.deepspeed_config


def main() -> None:
    rank, _ = start_distributed(deadline=600.0)
    torch.set_num_threads(1)
    results: dict[Any, Any] = {(stage, count): accumulate(stage, count) for stage in STAGES for count in COUNTS}
    results["routed"] = routed()
    results |= {("experts", stage): experts(stage) for stage in (0, 3)}
    deepspeed_engine.deepspeed_config = with_small_buckets
    results |= {kind: norms(kind) for kind in OFFLOADS}
    if rank == 0:
        torch.save(results, sys.argv[1])
    # A rank that is gone while the other still talks to it can abort the other's end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
