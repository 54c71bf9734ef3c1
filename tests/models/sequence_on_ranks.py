"""Rows shared by the ranks of a group, for as many as the environment says: ``OUTPUT``.

Run by test_sequence.py in processes of its own. Each rank writes the statistics that it has, and the sum of gradients.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed
from kernels.gpu_attention import stand_in
from models.architectures import build_tiny
from rollout.fakes import played
from torch import Tensor

from agentrl.algorithms import HeadVarianceAccumulator
from agentrl.batch import Batch, MicroBatch
from agentrl.kernels import TokenStatistics
from agentrl.kernels.attention import AttentionBackend, SequenceParallelGroup
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.lora import add_adapters, is_adapter_factor
from agentrl.models.policy import PolicyModel, ValueModel
from agentrl.models.settings import LoRASettings
from agentrl.training.step.reference_and_critic import FrozenPolicy
from agentrl.trajectory import Segment

WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how its rows are read."""

    kind: str = "qwen2"
    changes: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    attention: AttentionBackend = "sdpa"
    lengths: tuple[tuple[int, int], ...] = ((3, 7), (5, 2), (3, 11), (3, 1), (8, 4))  # of prompts and responses
    energies: bool = False
    adapted: bool = False


CASES = {
    "two KV heads": Case(energies=True),
    "one KV head": Case(kind="qwen3", changes={"num_key_value_heads": 1}, energies=True),
    "KV heads that no number of ranks divides": Case(
        kind="llama", changes={"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}
    ),
    "windows": Case(kind="mistral", changes={"sliding_window": 4}),
    "windows, capped scores": Case(kind="gemma2", changes={**WINDOWS, "attn_logit_softcapping": 2.0}),
    "flex": Case(kind="gemma2", changes={**WINDOWS, "attn_logit_softcapping": 2.0}, attention="flex"),
    "sinks": Case(kind="gpt_oss"),
    "sinks, flash, adapters": Case(kind="mimo_v2_flash", attention="flash", adapted=True),
    "flash": Case(kind="qwen3", changes={"num_key_value_heads": 1}, attention="flash", energies=True),
    "recomputed": Case(kind="gemma3_text", changes=WINDOWS, checkpointing=True),
    "adapters": Case(kind="qwen3", energies=True, adapted=True),
    "model tokens on few ranks": Case(lengths=((40, 2),), energies=True),
    "a row that ends with its last slice": Case(lengths=((4, 5),)),
}


def batch_of(case: Case, *, ranks: int) -> Batch:
    """Trajectories with observations. Prompts of three tokens agree; a prompt of eight continues the first one."""
    draw = random.Random(9)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(250) for _ in range(count))

    def segment(ids: tuple[int, ...]) -> Segment:
        given = {"log_probs": (-1.0,) * len(ids), "version_spans": ((0, len(ids)),)}
        return Segment(origin="model", token_ids=ids, text="", **given)

    shared, rows = tokens(3), []
    for prompt, response in case.lengths:
        segments = [segment(tokens(max(1, response // 2)))]
        if response > 4:
            segments.append(Segment(origin="observation", token_ids=tokens(2), text=""))
            segments.append(segment(tokens(response - response // 2 - 2)))
        ids = shared if prompt == 3 else (*shared, *rows[0].response_ids[:5]) if prompt == 8 else tokens(prompt)
        rows.append(played(prompt_ids=ids, segments=tuple(segments)))
    return Batch.from_micro_batch(MicroBatch.from_trajectories(rows), multiple=ranks)


def model_of(case: Case, *, seed: int = 0) -> Any:
    model = build_tiny(case.kind, seed=seed, **case.changes)
    if case.adapted:
        add_adapters(model, LoRASettings(rank=2))
        for name, item in model.named_parameters():
            if is_adapter_factor(name):
                torch.nn.init.normal_(item, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    model = model.double().train()
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    return model


def loss_of(statistics: TokenStatistics) -> Tensor:
    """A loss of every field with a gradient, in which every token weighs something else."""
    scale = torch.linspace(-1, 2, len(statistics.log_probs), dtype=torch.float64)
    value = (statistics.log_probs * scale).sum() + (statistics.entropy.square() * scale.flip(0)).sum()
    assert statistics.full_kl is not None
    assert statistics.teacher_divergence is not None
    return value + ((statistics.full_kl + 2 * statistics.teacher_divergence) * scale).sum()


def found_by(case: Case, sequence: SequenceParallelGroup | None) -> dict[str, Any]:
    """Statistics, values, energies and this rank's gradients."""
    batch, model = batch_of(case, ranks=1 if sequence is None else sequence.size), model_of(case)
    policy = PolicyModel(model, attention=case.attention, sequence=sequence)
    other = PolicyModel(model_of(case, seed=1), attention=case.attention, sequence=sequence)
    places = (batch.input_ids, batch.prompt_lengths, batch.response_mask)
    inputs = (batch.row, batch.rows, batch.columns)
    _, reference = FrozenPolicy(other, other, temperature=0.7, needs_full_distribution=True).score_batch(batch)
    assert reference is not None
    teacher = replace(reference, beta=0.3, temperature=1.1)
    statistics, hidden = policy(*inputs, temperature=0.7, keep_hidden=True, reference=reference, teacher=teacher)
    loss_of(statistics).backward()
    critic = ValueModel(model_of(case), attention=case.attention, sequence=sequence)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(2))
    values = critic(batch.row, batch.response_mask.shape[1])
    counted = torch.arange(values.shape[1]) <= batch.response_lengths[:, None]
    torch.where(counted, values.square(), 0.0).sum().backward()
    found: dict[str, Any] = {name: value.detach() for name, value in vars(statistics).items()}
    held = policy.local_token_indices(*inputs)
    own = hidden if held is None else hidden[: len(held)]
    if sequence is not None:
        hidden = sequence.all_gather(own, held, len(statistics.log_probs))
    found |= {"hidden": hidden, "values": torch.where(counted, values.detach(), 0.0)}
    found |= head_variance(policy, batch, own, held)
    found |= {"learns": [name for name, value in vars(statistics).items() if value.requires_grad]}
    if case.energies:
        found["energies"] = policy.trajectory_energies(*places, temperature=0.7)
    modules = {"policy": policy, "critic": critic}
    gradients = {
        f"{which} {name}": item.grad
        for which, module in modules.items()
        for name, item in module.named_parameters()
        if item.requires_grad
    }
    return found | {"gradients": gradients}


def head_variance(policy: PolicyModel, batch: Batch, hidden: Tensor, held: Tensor | None) -> dict[str, Tensor]:
    """Power and signal of the head's gradient over two groups, from the states that this rank holds."""
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    accumulator = HeadVarianceAccumulator(policy.head.weight, temperature=0.7)
    accumulator.update(
        hidden=hidden,
        targets=batch.response_ids[rows, columns],
        advantages=torch.linspace(-1, 2, len(rows), dtype=torch.float64),
        rows=rows,
        groups=torch.arange(len(batch.input_ids)) % 2,
        token_indices=held,
        over_ranks=None if policy.sequence is None else policy.sequence.all_reduce,
    )
    found = accumulator.result()
    return {"power": torch.tensor(found.power), "signal": torch.tensor(found.signal)}


def groups() -> dict[int, SequenceParallelGroup]:
    """The groups of two and of all ranks that this one belongs to, by their size."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    made = {}
    for size in sorted({2, world}):
        own, _ = torch.distributed.new_subgroups(size)
        assert own is not None
        made[size] = SequenceParallelGroup(rank=rank % size, size=size, group=own)
    return made


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    stand_in(pytest.MonkeyPatch())
    results: dict[int, dict[str, Any]] = {}
    for size, sequence in groups().items():
        results[size] = {}
        for name, case in CASES.items():
            found = results[size][name] = found_by(case, sequence)
            for gradient in found["gradients"].values():
                torch.distributed.all_reduce(gradient, group=sequence.group)
    torch.save(results, sys.argv[1])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
