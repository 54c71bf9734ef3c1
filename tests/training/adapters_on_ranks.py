"""Training of adapters, saved halfway and resumed, on as many ranks as the environment says: ``OUTPUT``.

Run by test_adapters_on_ranks.py in processes of its own; rank 0 writes what came out, by ZeRO stage.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from agentrl.kernels.attention import pack_padded
from agentrl.models.lora import add_adapters, disabled_adapters, is_adapter_factor
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import LoRASettings
from agentrl.training.engine.collectives import gather_from_ranks
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl.weights.exports import adapter_parameters, merged_parameters
from agentrl.weights.sources import full_parameters

STAGES = (0, 1, 2, 3)
LORA = LoRASettings(rank=2, alpha=8)
STEPS = 4


def start(stage: int) -> TrainingEngine[PolicyModel]:
    from energies_on_ranks import make_model  # beside this script, which pytest imports from elsewhere

    policy = PolicyModel(add_adapters(make_model(tied=True, kind="qwen3"), LORA))
    return TrainingEngine(
        policy,
        optimizer=OptimizerSettings(learning_rate=0.05, epsilon=1.0, weight_decay=0.0, gradient_clip=1e9),
        training=TrainingSettings(zero_stage=stage, persistence_threshold=0),
        bfloat16=False,
        updates=STEPS,
    )


def step(engine: TrainingEngine[PolicyModel]) -> torch.Tensor:
    """One step with a KL term against the model under the adapters, as the trainer has it; the reference's scores."""
    from energies_on_ranks import batch

    ids, lengths, mask = batch()
    share = slice(engine.rank, None, engine.world_size)
    rows = pack_padded(ids[share], lengths[share], mask[share])
    statistics, _ = engine(*rows)
    with torch.no_grad(), disabled_adapters(engine.module.causal_lm):
        reference, _ = engine(*rows)
    difference = statistics.log_probs - reference.log_probs
    loss = (difference.square() / 2 - statistics.log_probs).sum() / mask.sum()
    engine.backward(loss * engine.world_size)
    engine.step()
    scores = torch.zeros(mask.shape)
    scores[share][mask[share]] = reference.log_probs
    return sum(gather_from_ranks(scores), torch.zeros(mask.shape))


def run(stage: int, folder: Path) -> dict[str, Any]:
    engine = start(stage)
    scores = []
    for number in range(STEPS):
        if number == STEPS // 2:
            engine.copy_rank_state().write(folder / f"part-{engine.rank:05d}.safetensors")
            gather_from_ranks(None)  # when every rank has written
        scores.append(step(engine))
    resumed = start(stage)
    resumed.load_checkpoint(folder)
    for _ in range(STEPS // 2, STEPS):
        step(resumed)
    whole, again = (
        {name: value.clone() for name, value in adapter_parameters(item.module.causal_lm)} for item in (engine, resumed)
    )
    model = engine.module.causal_lm
    frozen = {
        name: value.clone() for name, value in full_parameters(model, wanted=lambda name: not is_adapter_factor(name))
    }
    return {
        "adapter": whole,
        "resumed": again,
        "frozen": frozen,
        "merged": {name: value.clone() for name, value in merged_parameters(model, LORA)},
        "reference": scores,
        "saved": _saved_names(folder),
    }


def _saved_names(folder: Path) -> set[str]:
    """The parameters of the module in a checkpoint."""
    keys = [key for path in folder.iterdir() for key in safe_open(path, framework="pt").keys()]  # noqa: SIM118
    return {key.removeprefix("weight/") for key in keys if key.startswith("weight/")}


def main() -> None:
    rank, _ = start_distributed(deadline=600.0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        shared = Path(gather_from_ranks(own)[0])
        results = {stage: run(stage, shared / str(stage)) for stage in STAGES}
        if rank == 0:
            torch.save(results, sys.argv[1])
        # A rank that is gone while the other still talks to it can abort the other's end.
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
