"""A plan in words, for `agentrl plan` and the dry run."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.planning.estimate import usable
from agentrl.planning.memory import GB, GIB, ModelShape, RankMemory, ServerMemory
from agentrl.planning.search import Hardware, Plan


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
        words.append("gradient checkpointing")
    if setup.offload != "none":
        words.append("the optimizer offloaded" if setup.offload == "optimizer" else "optimizer and weights offloaded")
    if setup.lora_rank:
        words.append(f"adapters of rank {setup.lora_rank}")
    words.append(f"vLLM {plan.placement}")
    return ", ".join(words) + f"; micro-batches of {setup.tokens:,} tokens"


def _part(name: str, size: int) -> str:
    return f"  {name:<26} {size / (GIB / 1024):12,.1f} MiB"
