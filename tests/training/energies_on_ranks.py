"""Exact energies between two training steps, on as many ranks as the environment says: ``OUTPUT``.

Run by test_energies_on_ranks.py in processes of its own; rank 0 writes what came out, by ZeRO stage.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from agentrl.kernels.attention import pack_padded
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.policy import PolicyModel
from agentrl.training.engine.collectives import gather_from_ranks
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl.weights.sources import full_parameters

ROWS = 5
CASES = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2, "tied": False},
    "zero3": {"zero_stage": 3},
    "zero3_untied": {"zero_stage": 3, "tied": False, "kind": "qwen2"},
    "zero3_checkpointed": {"zero_stage": 3, "checkpointed": True},
}


def make_model(*, tied: bool, kind: str) -> Any:
    """A seeded model of a few thousand parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "pad_token_id": None,
    }
    torch.manual_seed(3)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    return Qwen3ForCausalLM(Qwen3Config(head_dim=4, **shape))


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input_ids [5, 12], prompt_lengths [5], response_mask [5, 9])."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (ROWS, 12), generator=draw)
    lengths = torch.tensor([3, 3, 2, 3, 1])
    mask = torch.rand(ROWS, 9, generator=draw) < 0.6
    mask[:, 0] = True
    return ids, lengths, mask


def run(*, zero_stage: int, tied: bool = True, kind: str = "qwen3", checkpointed: bool = False) -> dict[str, Any]:
    """Two steps with the energies of unequal shares of the batch asked for before each, or not."""
    ids, lengths, mask = batch()
    result: dict[str, Any] = {}
    for asked in (True, False):
        model = make_model(tied=tied, kind=kind)
        if checkpointed:
            enable_gradient_checkpointing(model)
            model.train()
        policy = PolicyModel(model)
        engine = TrainingEngine(
            policy,
            optimizer=OptimizerSettings(learning_rate=0.3, epsilon=1.0, weight_decay=0.0, gradient_clip=1e9),
            training=TrainingSettings(zero_stage=zero_stage, persistence_threshold=0),
            bfloat16=False,
            updates=5,
        )
        # Rank 0 takes two rows, the others the rest: a head that ran once a row would wait for ever.
        share = slice(0, ROWS) if engine.world_size == 1 else (slice(0, 2), slice(2, ROWS))[engine.rank]
        ids, lengths, mask = (one.to(engine.device) for one in (ids, lengths, mask))
        found = []
        sharded = zero_stage == 3
        for _ in range(2):
            if asked:
                assert (model.lm_head.weight.numel() == 0) is sharded, "not sharded as meant"
                own = policy.trajectory_energies(ids[share], lengths[share], mask[share], temperature=0.8)
                found.append(torch.cat(gather_from_ranks(own)))
            statistics, _ = engine(*pack_padded(ids, lengths, mask))
            engine.backward(-statistics.log_probs.mean())
            if asked:  # between backward and step: the gradients that wait must stay
                policy.trajectory_energies(ids[share], lengths[share], mask[share])
            engine.step()
        weights = torch.cat([value.flatten().clone() for _, value in full_parameters(model)])
        result |= {"energies": torch.stack(found), "asked": weights} if asked else {"not_asked": weights}
    return result


def main() -> None:
    rank, _ = start_distributed(deadline=600.0)
    torch.set_num_threads(1)
    results = {name: run(**case) for name, case in CASES.items()}  # type: ignore[arg-type]
    if rank == 0:
        torch.save(results, sys.argv[1])
    # A rank that is gone while the other still talks to it can abort the other's end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
