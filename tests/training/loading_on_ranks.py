"""A policy read for ZeRO-3 by as many ranks as the environment says: ``OUTPUT``.

Run by test_loading.py in processes of its own. The output's folder holds the policy, ``policy``; every rank writes what
it found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from agentrl.kernels.attention import PackedRow, pack_padded
from agentrl.models.exactness import check_packed_forward
from agentrl.models.loading import read_model
from agentrl.models.policy import PolicyModel, ValueModel
from agentrl.models.settings import ModelSettings
from agentrl.training.engine.deepspeed_engine import (
    TrainingEngine,
    build_frozen_forward,
    read_model_for_training,
    start_distributed,
)
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl.training.step.reference_and_critic import FrozenPolicy
from agentrl.weights.sources import full_parameters

SETTINGS = ModelSettings(dtype="float32", gradient_checkpointing=True)
TRAINING = TrainingSettings(zero_stage=3, persistence_threshold=0)
OPTIMIZER = OptimizerSettings(learning_rate=0.1, epsilon=1.0, weight_decay=0.5, gradient_clip=1e9)


def inputs() -> tuple[PackedRow, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 200, (3, 9), generator=draw)
    lengths = torch.tensor([2, 3, 1])
    return pack_padded(ids, lengths, torch.ones(3, 6, dtype=torch.bool))


def whole(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in full_parameters(module)}


def train(model: Any) -> dict[str, Any]:
    """Log-probabilities and all parameters after one update of a policy and of a critic."""
    policy = PolicyModel(model)
    engine = TrainingEngine(policy, optimizer=OPTIMIZER, training=TRAINING, bfloat16=False, updates=3)
    check_packed_forward("policy", policy)  # gathers every parameter, and leaves training as it was
    statistics, _ = engine(*inputs())
    engine.backward(-statistics.log_probs.mean())
    engine.step()
    return {"log_probs": statistics.log_probs.detach(), "trained": whole(model)}


def criticise(model: Any) -> dict[str, torch.Tensor]:
    critic = ValueModel(model)
    engine = TrainingEngine(critic, optimizer=OPTIMIZER, training=TRAINING, bfloat16=False, updates=3)
    row, *_ = inputs()
    for _ in range(2):  # the head starts at zero, and what lies below it moves at the second update
        engine.backward((engine(row, 6) - 1).square().mean())
        engine.step()
    return whole(critic)


def refer(model: Any) -> torch.Tensor:
    policy = PolicyModel(model)
    forward = build_frozen_forward(policy, TRAINING, bfloat16=False)
    return FrozenPolicy(policy, forward, temperature=1.0, needs_full_distribution=True)._weight


def main() -> None:
    output = Path(sys.argv[1])
    path = output.parent / "policy"
    start_distributed(deadline=600.0)
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    model = read_model_for_training(path, SETTINGS, TRAINING)
    parameters: list[Any] = list(model.parameters())  # DeepSpeed adds attributes
    result["held"] = sum(item.numel() for item in parameters)
    result["shard"] = sum(item.ds_tensor.numel() for item in parameters)
    result["all"] = sum(item.ds_numel for item in parameters)
    result["read"] = whole(model)  # before any forward
    result["buffers"] = dict(model.named_buffers())
    result["generation"] = model.generation_config.to_dict()
    result["modes"] = [model.config.attention_dropout, model.is_gradient_checkpointing]
    result["tied"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    half = read_model_for_training(path, SETTINGS.model_copy(update={"dtype": "bfloat16"}), TRAINING)
    result["half"] = whole(half) | dict(half.named_buffers())
    for name, read in (("sharded", None), ("plain", read_model)):
        again = [
            read_model_for_training(path, SETTINGS, TRAINING) if read is None else read(path, SETTINGS) for _ in "12"
        ]
        result[name] = train(model if read is None else read(path, SETTINGS))
        result[name] |= {"critic": criticise(again[0]), "reference": refer(again[1])}
    torch.save(result, output)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
