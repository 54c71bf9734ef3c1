"""Memory in words: a plan for `agentrl plan`; for the dry run the settings as they are, and whether GPUs hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from agentrl.config import Settings
from agentrl.planning.estimate import CONTEXT, largest_micro_batch, rank_memory, server_memory, usable
from agentrl.planning.memory import GB, GIB, ModelShape, RankMemory, ServerMemory, TrainingSetup
from agentrl.planning.overlay import changed_values, plan_values, setup_of, wish_of
from agentrl.planning.search import Hardware, Plan, contexts, find_plan, server_share
from agentrl.rollout.engines.table import engine_facts

SIZES = (80, 48)
"""GB of the GPUs that a dry run looks at where there is none."""


def rank_lines(rank: RankMemory) -> list[str]:
    """The parts of a rank at its peak, in MiB, and what is offloaded."""
    lines = [_part(name, size) for name, size in rank.parts().items()]
    lines.append(_part(f"total, at the {rank.busiest}", rank.total))
    return [*lines, _part("in the host's memory", rank.host)] if rank.host else lines


def server_lines(server: ServerMemory) -> list[str]:
    """The parts of a server on one GPU, and the tokens it holds."""
    return [
        _part("weights", server.weights),
        _part("overhead (assumed)", server.overhead),
        f"{_part('KV cache', server.kv_cache)}, {server.kv_tokens:,} tokens a server",
        _part(f"total, {server.share:g} of the GPU", server.total),
    ]


def plan_lines(shape: ModelShape, machine: Hardware, plan: Plan) -> Iterator[str]:
    """What the plan does, and what each part needs."""
    yield f"model: {shape.name}, {shape.parameters / 1e6:,.2f}M parameters"
    yield f"on {machine}: {_does(plan)}"
    may = usable(machine.memory)
    yield f"one rank, estimated ({plan.rank.total / GB:.1f} of {may / GB:.1f} GB that may be filled):"
    yield from rank_lines(plan.rank)
    servers = "1 server" if plan.replicas == 1 else f"{plan.replicas} servers"
    yield f"one GPU of {servers} of {plan.tensor_parallel}, estimated:"
    yield from server_lines(plan.server)


def _does(plan: Plan) -> str:
    setup = plan.setup
    words = [f"{setup.ranks} ranks" if setup.ranks > 1 else "1 rank", f"ZeRO {setup.stage}"]
    if setup.checkpointing:
        words.append("gradient checkpointing" + " in the host's memory" * setup.checkpoint_offload)
    if setup.offload != "none":
        words.append("the optimizer offloaded" if setup.offload == "optimizer" else "optimizer and weights offloaded")
    if setup.sequence_parallel > 1:
        words.append(f"each row shared by {setup.sequence_parallel} ranks")
    if setup.lora_rank:
        words.append(f"adapters of rank {setup.lora_rank}")
    words.append(f"vLLM {plan.placement}")
    return ", ".join(words) + f"; micro-batches of {setup.tokens:,} tokens"


def _part(name: str, size: int) -> str:
    return f"  {name:<26} {size / (GIB / 1024):12,.1f} MiB"


def memory_lines(settings: Settings, shape: ModelShape, *, critic: bool) -> Iterator[str]:
    """The estimate of one rank; where servers are started, also whether GPUs hold rank and server."""
    facts = engine_facts(settings.rollout)
    on_gpus = torch.cuda.is_available() or facts.starts_servers
    setup = setup_of(settings, backend="triton" if on_gpus else "chunked", critic=critic)
    context = (contexts(settings.rollout.vllm.placement) if facts.starts_servers else CONTEXT) if on_gpus else 0
    rank = rank_memory(shape, setup, kv_tokens=_kv_tokens(settings), context=context)
    yield f"model: {shape.parameters / 1e6:,.2f}M parameters; memory of one rank, estimated:"
    yield from rank_lines(rank)
    if not facts.starts_servers:
        return
    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    for memory in [size * GB for size in SIZES] if here is None else [here]:
        yield _verdict(settings, shape, setup, rank, memory, critic=critic)


def _kv_tokens(settings: Settings) -> int:
    """Of the transformers engine: its cache, or all trajectories at their longest if those are fewer."""
    rollout = settings.rollout
    rows = min(rollout.concurrency, rollout.problems_per_step * rollout.group_size)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    return min(engine_facts(rollout).kv_slots or 0, rows * longest)


def _verdict(
    settings: Settings, shape: ModelShape, setup: TrainingSetup, rank: RankMemory, memory: int, *, critic: bool
) -> str:
    vllm = settings.rollout.vllm
    colocated = vllm.placement == "colocated"
    servers = vllm.replicas * vllm.tensor_parallel_size
    machine = Hardware(gpus=setup.ranks if colocated else setup.ranks + servers, memory=memory)
    wish = wish_of(settings, critic=critic)
    share = vllm.gpu_memory_utilization or (server_share(rank, memory) if colocated else 0.85)
    server = server_memory(shape, memory=memory, share=share, tensor_parallel=vllm.tensor_parallel_size)
    wakes = not colocated or share <= server_share(rank, memory)
    trains = rank.total <= usable(memory)
    if trains and wakes and server.kv_tokens >= wish.longest_request:
        free = memory - (contexts(vllm.placement) - CONTEXT)
        largest = largest_micro_batch(shape, setup, memory=free)
        return (
            f"  on {machine}: fits, {rank.total / GB:.1f} of {usable(memory) / GB:.1f} GB; micro-batches of up to "
            f"{largest:,} tokens fit; a server holds {server.kv_tokens:,} tokens"
        )
    found = find_plan(shape, machine, wish)
    if found is None:
        return f"  on {machine}: does not fit ({_lack(trains, wakes)}), and no other settings do: see agentrl plan"
    changes = changed_values(settings, plan_values(found))
    wanted = " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()
    )
    return f"  on {machine}: does not fit ({_lack(trains, wakes)}); would fit with {wanted}"


def _lack(trains: bool, wakes: bool) -> str:
    if not trains:
        return "the rank's peak"
    return "the server's KV cache" if wakes else "the server beside the rank's weights"
