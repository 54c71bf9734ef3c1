"""``agentrl plan``: the cheapest settings that train a model on given GPUs. Also the dry run's memory estimate.

The candidates are few and their memory has a closed form, so all are tried, cheapest first.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import yaml

from agentrl.config import Settings
from agentrl.errors import SettingsError
from agentrl.models.attention import length_obstacle, sharing_obstacle
from agentrl.planning.memory import (
    CONTEXT,
    GB,
    GIB,
    ModelShape,
    Offload,
    Placement,
    RankMemory,
    ServerMemory,
    TrainingSetup,
    rank_memory,
    read_shape,
    server_memory,
    usable,
)
from agentrl.rollout.engines.base import EngineFacts, engine_facts
from agentrl.rollout.settings import longest_request
from agentrl_envs.registry import install_extra

Values = dict[str, object]
"""Settings by dotted key."""

_LORA_RANK = 32  # rank of proposed adapters; published reinforcement learning uses 1 to 32
_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")
_TOKEN_STEP = 1024  # planned micro-batches are multiples of this number of tokens
_MOST_STEPS = 64  # limit of a planned micro-batch, which already saturates a GPU
_LARGEST_SHARE = 0.85
_SHARE_STEP = 0.05
_SHORTEST = 64
_SIZES = (80, 48)  # GB of the GPUs that a dry run assumes on a machine without a GPU


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of ``agentrl plan``. Omitted options are None."""

    gpus: int | None = None
    memory: float | None = None  # GB per GPU
    context: int | None = None  # tokens of prompt and response
    lora: bool = False
    base: tuple[str, ...] = ()  # the --config overlays that the plan extends
    write: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The GPUs of a run."""

    gpus: int
    memory: int  # bytes per GPU

    def __str__(self) -> str:
        return f"{self.gpus} {'GPU' if self.gpus == 1 else 'GPUs'} of {self.memory / GB:g} GB"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Settings that a plan must not change, and the adapters that a plan may use."""

    context: int  # tokens of the longest trajectory, prompt and response
    longest_request: int  # tokens that a server must hold, evaluations included
    bfloat16: bool = True
    reference: bool = False
    critic: bool = False
    tensor_parallel: int | None = None  # None: the smallest size that fits
    lora_ranks: tuple[int, ...] = (0,)  # 0: all weights are trained

    @classmethod
    def of(cls, settings: Settings, *, critic: bool, only_adapt: bool = False) -> Requirements:
        rollout, lora = settings.rollout, settings.model.lora.rank
        parallel = engine_facts(rollout).gpus_per_server
        adapters = (lora or _LORA_RANK,)
        return cls(
            context=rollout.max_prompt_tokens + rollout.max_response_tokens,
            longest_request=longest_request(rollout, settings.evaluation.max_response_tokens),
            bfloat16=settings.model.dtype == "bfloat16",
            reference=settings.kl.coefficient > 0,
            critic=critic,
            tensor_parallel=parallel if parallel > 1 else None,
            lora_ranks=adapters if only_adapt or lora else (0, *adapters) if _has_peft() else (0,),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings that fit the GPUs, with their memory estimates."""

    setup: TrainingSetup
    placement: Placement
    replicas: int
    tensor_parallel: int
    rank: RankMemory
    server: ServerMemory


def find_plan(shape: ModelShape, machine: Hardware, required: Requirements) -> Plan | None:
    """Return the cheapest settings that fit, or None."""
    for setup, placement in sorted(_candidates(shape, machine, required), key=_cost):
        rank = rank_memory(shape, setup, context=_contexts(placement))
        if rank.total > usable(machine.memory):
            continue
        colocated = placement == "colocated"
        share = _server_share(rank, machine.memory) if colocated else _LARGEST_SHARE
        gpus = machine.gpus if colocated else machine.gpus // 2
        for parallel in (required.tensor_parallel,) if required.tensor_parallel else (1, 2, 4, 8):
            server = server_memory(shape, memory=machine.memory, share=share, tensor_parallel=parallel)
            divides = gpus % parallel == 0 and shape.heads % parallel == 0
            if divides and server.kv_tokens >= required.longest_request:
                largest = _largest_micro_batch(shape, setup, placement, machine.memory)
                setup = replace(setup, tokens=max(required.context, largest))
                return Plan(
                    setup=setup,
                    placement=placement,
                    replicas=gpus // parallel,
                    tensor_parallel=parallel,
                    rank=rank_memory(shape, setup, context=_contexts(placement)),
                    server=server,
                )
    return None


def _candidates(
    shape: ModelShape, machine: Hardware, required: Requirements
) -> Iterator[tuple[TrainingSetup, Placement]]:
    """Yield every combination that DeepSpeed and the model support.

    DeepSpeed frees the GPU for a colocated server at stages 1 and 2 only, and offloads weights at stage 3 only.
    """
    checkpoints = ((False, False), (True, False), (True, True))
    placements: tuple[Placement, ...] = ("colocated", "dedicated") if machine.gpus > 1 else ("colocated",)
    for stage, (checkpointing, on_host), offload, shared, placement, lora in itertools.product(
        (2, 3), checkpoints, _OFFLOADS, (1, 2, 4, 8), placements, required.lora_ranks
    ):
        ranks = machine.gpus if placement == "colocated" else machine.gpus - machine.gpus // 2
        if (placement == "colocated" and stage == 3) or (offload == "all" and stage < 3) or (ranks == 1 and stage == 3):
            continue
        if ranks % shared or sharing_obstacle(shape.config, shared) is not None:
            continue
        setup = TrainingSetup(
            ranks=ranks,
            stage=stage,
            bfloat16=required.bfloat16,
            tokens=required.context,
            checkpointing=checkpointing,
            checkpoint_offload=on_host,
            offload=offload,
            sequence_parallel=shared,
            lora_rank=lora,
            reference=required.reference,
            critic=required.critic,
        )
        yield setup, placement


def _cost(candidate: tuple[TrainingSetup, Placement]) -> tuple[bool, float]:
    """Return a sort key by relative step time. Adapters sort last, because they train different parameters.

    Recomputing the forward adds one third. Checkpoints in host memory cross the bus twice: for 7B, 0.4 MB per token,
    16 us at 25 GB/s, compared with 150 us of computation. Stage 3 sends 50 % more (arXiv 1910.02054, section 7).
    Offloaded states cross the bus in each step, offloaded weights in each micro-batch (arXiv 2104.07857). Two
    sequence-parallel ranks send up to 4 D numbers of two bytes per token and layer, in forward and backward, half of
    them to the other rank: for 7B, 0.8 MB per token, 40 us at 20 GB/s (no NVLink), compared with 110 us of computation
    at 400 TFLOP/s. Dedicated servers halve the GPUs that train, and are idle during training.
    """
    setup, placement = candidate
    factors = (
        4 / 3 if setup.checkpointing else 1.0,
        1.1 if setup.checkpoint_offload else 1.0,
        1.15 if setup.stage == 3 else 1.0,
        {"none": 1.0, "optimizer": 1.3, "all": 3.0}[setup.offload],
        1.0 if setup.sequence_parallel == 1 else 1.35 + 0.01 * setup.sequence_parallel,  # prefers small groups
        2.0 if placement == "dedicated" else 1.0,
    )
    return setup.lora_rank > 0, math.prod(factors)


def _contexts(placement: str) -> int:
    """Return the bytes of the CUDA contexts on a training GPU. A sleeping server keeps its context."""
    return 2 * CONTEXT if placement == "colocated" else CONTEXT


def _largest_micro_batch(shape: ModelShape, setup: TrainingSetup, placement: str, memory: int) -> int:
    """Return the size in tokens of the largest micro-batch that fits, a multiple of 1,024 up to 65,536, or 0."""
    for tokens in range(_MOST_STEPS * _TOKEN_STEP, 0, -_TOKEN_STEP):
        rank = rank_memory(shape, replace(setup, tokens=tokens), context=_contexts(placement))
        if rank.total <= usable(memory):
            return tokens
    return 0


def _server_share(rank: RankMemory, memory: int) -> float:
    """Return a colocated server's fraction of the GPU while the rank's weights, reference and critic stay loaded."""
    kept = sum(rank.static[name] for name in ("weights", "gathered weights", "reference")) + CONTEXT
    kept += rank.static["weights"] if rank.static["critic"] else 0
    share = min(_LARGEST_SHARE, (usable(memory) - kept) / memory)
    return max(0.0, round(math.floor(share / _SHARE_STEP + 1e-9) * _SHARE_STEP, 2))


def plan_for(shape: ModelShape, machine: Hardware, required: Requirements) -> Plan:
    """Return the cheapest plan.

    Raises SettingsError, which suggests other hardware or a shorter context, if no plan fits.
    """
    found = find_plan(shape, machine, required)
    if found is not None:
        return found
    options = []
    more = (machine.gpus * 2**power for power in range(1, 8))
    options += [f"{n} GPUs with this memory" for n in more if find_plan(shape, replace(machine, gpus=n), required)][:1]
    larger = (size * GB for size in (16, 24, 32, 40, 48, 80, 96, 141, 192, 288) if size * GB > machine.memory)
    options += [
        f"{size / GB:g} GB per GPU" for size in larger if find_plan(shape, replace(machine, memory=size), required)
    ][:1]
    context = required.context // 2
    while context >= _TOKEN_STEP:
        shorter = replace(required, context=context, longest_request=min(required.longest_request, context))
        if find_plan(shape, machine, shorter):
            options.append(f"a context of {context} tokens")
            break
        context //= 2
    would = f"would fit: {', or '.join(options)}" if options else "even 128 times as many GPUs do not suffice"
    need = min(
        rank_memory(shape, setup, context=_contexts(placement)).total
        for setup, placement in _candidates(shape, machine, required)
    )
    raise SettingsError(
        f"no settings train {shape.name} ({shape.parameters / 1e9:,.2f}B parameters) with {required.context} tokens on "
        f"{machine}: a rank needs at least {need / GB:,.1f} GB, and a server must hold {required.longest_request} "
        f"tokens; {would}"
    )


def plan_values(plan: Plan) -> Values:
    """Return the settings of a plan by dotted key."""
    setup = plan.setup
    values: Values = {
        "model.dtype": "bfloat16" if setup.bfloat16 else "float32",
        "model.gradient_checkpointing": setup.checkpointing,
        "model.checkpoint_offload": setup.checkpoint_offload,
        "rollout.engine": "vllm",
        "rollout.vllm.placement": plan.placement,
        "rollout.vllm.replicas": plan.replicas,
        "rollout.vllm.tensor_parallel_size": plan.tensor_parallel,
        "rollout.vllm.gpu_memory_utilization": plan.server.share,
        "training.num_processes": setup.ranks,
        "training.zero_stage": setup.stage,
        "training.micro_batch_tokens": setup.tokens,
        "training.offload": setup.offload,
        "training.sequence_parallel": setup.sequence_parallel,
    }
    return values | ({"model.lora.rank": setup.lora_rank} if setup.lora_rank else {})


def plan_lines(shape: ModelShape, machine: Hardware, plan: Plan) -> Iterator[str]:
    """Describe a plan and the memory of its parts."""
    setup = plan.setup
    words = [f"{setup.ranks} ranks" if setup.ranks > 1 else "1 rank", f"ZeRO {setup.stage}"]
    if setup.checkpointing:
        words.append("gradient checkpointing" + " in host memory" * setup.checkpoint_offload)
    if setup.offload != "none":
        words.append("optimizer offloaded" if setup.offload == "optimizer" else "optimizer and weights offloaded")
    if setup.sequence_parallel > 1:
        words.append(f"sequence-parallel groups of {setup.sequence_parallel} ranks")
    if setup.lora_rank:
        words.append(f"adapters of rank {setup.lora_rank}")
    words.append(f"vLLM {plan.placement}")
    yield f"model: {shape.name}, {shape.parameters / 1e6:,.2f}M parameters"
    yield f"on {machine}: {', '.join(words)}; micro-batches of {setup.tokens:,} tokens"
    may = usable(machine.memory)
    yield f"one rank, estimated ({plan.rank.total / GB:.1f} of {may / GB:.1f} usable GB):"
    yield from _rank_lines(plan.rank)
    servers = "1 server" if plan.replicas == 1 else f"{plan.replicas} servers"
    yield f"one GPU of {servers} (tensor parallel size {plan.tensor_parallel}), estimated:"
    server = plan.server
    yield _part("weights", server.weights)
    yield _part("overhead (assumed)", server.overhead)
    yield f"{_part('KV cache', server.kv_cache)}, {server.kv_tokens:,} tokens per server"
    yield _part(f"total, {server.share:g} of the GPU", server.total)


def _rank_lines(rank: RankMemory) -> Iterator[str]:
    for name, size in rank.parts().items():
        yield _part(name, size)
    yield _part(f"total, at the {rank.busiest}", rank.total)
    if rank.host:
        yield _part("in host memory", rank.host)


def _part(name: str, size: int) -> str:
    return f"  {name:<26} {size / (GIB / 1024):12,.1f} MiB"


def plan_command(settings: Settings, request: PlanRequest, *, critic: bool) -> list[str]:
    """Return the output lines of ``agentrl plan``, and write the overlay to ``request.write`` if it is set."""
    if settings.model.path is None:
        raise SettingsError("no model to plan for: set --model DIRECTORY, FILE.json or OWNER/NAME, or --config FILE")
    machine = _machine(request, settings)
    values: Values = {}
    if request.context is not None:
        context, rollout = request.context, settings.rollout
        if context < _SHORTEST:
            raise SettingsError(
                f"--context {context} is too short for a prompt and a response: set at least {_SHORTEST} tokens"
            )
        prompt = min(rollout.max_prompt_tokens, context // 2)
        limits = {"max_prompt_tokens": prompt, "max_response_tokens": context - prompt}
        limits["max_turn_tokens"] = min(rollout.max_turn_tokens, context - prompt)
        settings = settings.model_copy(update={"rollout": rollout.model_copy(update=limits)})
        values = {f"rollout.{key}": value for key, value in limits.items()}
    shape = read_shape(settings.model)
    required = Requirements.of(settings, critic=critic, only_adapt=request.lora)
    if 0 not in required.lora_ranks and not _has_peft():
        raise SettingsError(
            f"adapters require the package peft: run {install_extra('lora')}, or leave out --lora and set "
            "model.lora.rank=0"
        )
    obstacle = length_obstacle(shape.config, required.longest_request)
    if obstacle is not None:
        raise SettingsError(obstacle)
    plan = plan_for(shape, machine, required)
    nested: Values = {}
    if request.base:
        nested["base"] = request.base[0] if len(request.base) == 1 else [*request.base]
    for key, value in ({"model.path": settings.model.path} | values | plan_values(plan)).items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[name] = value
    title = f"# {shape.name} on {machine}, {required.context} tokens: written by agentrl plan\n"
    text = title + yaml.safe_dump(nested, sort_keys=False)
    lines = [f"# {line}" for line in plan_lines(shape, machine, plan)]
    if request.write is None:
        return [*lines, *text.splitlines()]
    try:
        request.write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--write {request.write}: {error.strerror}; set a file in an existing folder") from error
    return [*lines, f"# written to {request.write}: agentrl train --config {request.write}"]


def _machine(request: PlanRequest, settings: Settings) -> Hardware:
    """Return the requested GPUs, or by default the GPUs of this machine."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = request.gpus if request.gpus is not None else here or settings.training.num_processes
    if gpus < 1:
        raise SettingsError(f"--gpus {gpus} is not a number of GPUs: set at least 1, for example 8")
    if request.memory is not None:
        if not 0 < request.memory < 10_000:
            raise SettingsError(
                f"--memory {request.memory:g} is not the memory of a GPU: set GB between 0 and 10000, for example 80"
            )
        return Hardware(gpus=gpus, memory=int(request.memory * GB))
    if not here:
        raise SettingsError(
            "this machine has no GPU: set the number and memory of the GPUs, for example --gpus 8 --memory 80"
        )
    return Hardware(gpus=gpus, memory=torch.cuda.get_device_properties(0).total_memory)


def _has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def memory_lines(settings: Settings, shape: ModelShape, *, critic: bool) -> Iterator[str]:
    """Yield the dry run's memory estimate of a rank and, with servers, whether both fit on the GPUs."""
    facts = engine_facts(settings.rollout)
    rollout, placement = settings.rollout, _placement_of(facts)
    on_gpus = torch.cuda.is_available() or facts.servers
    setup = _setup_of(settings, backend="triton" if on_gpus else "chunked", critic=critic)
    context = (_contexts(placement) if facts.servers else CONTEXT) if on_gpus else 0
    # The transformers engine's cache, limited to all concurrent trajectories at maximum length.
    rows = min(rollout.concurrency, rollout.problems_per_step * rollout.group_size)
    kv_tokens = min(facts.kv_slots or 0, rows * (rollout.max_prompt_tokens + rollout.max_response_tokens))
    rank = rank_memory(shape, setup, kv_tokens=kv_tokens, context=context)
    yield f"model: {shape.parameters / 1e6:,.2f}M parameters; memory of one rank, estimated:"
    yield from _rank_lines(rank)
    if facts.servers:
        here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
        for memory in [size * GB for size in _SIZES] if here is None else [here]:
            yield _verdict(settings, shape, setup, rank, memory, critic=critic)


def _placement_of(facts: EngineFacts) -> Placement:
    return "colocated" if facts.shares_gpus else "dedicated"


def _setup_of(settings: Settings, *, backend: Literal["chunked", "triton"], critic: bool) -> TrainingSetup:
    """Return the training setup of these settings. ``backend``: the resolved ``training.head_backend=auto``."""
    training, bfloat16 = settings.training, settings.model.dtype == "bfloat16"
    return TrainingSetup(
        ranks=training.num_processes,
        stage=training.stage_that_runs(bfloat16=bfloat16),
        bfloat16=bfloat16,
        tokens=training.micro_batch_tokens,
        checkpointing=settings.model.gradient_checkpointing,
        checkpoint_offload=settings.model.checkpoint_offload,
        offload=training.offload,
        sequence_parallel=training.sequence_parallel,
        lora_rank=settings.model.lora.rank,
        head_backend=backend if training.head_backend == "auto" else training.head_backend,
        device="cuda" if backend == "triton" else "cpu",
        reference=settings.kl.coefficient > 0,
        critic=critic,
    )


def _verdict(
    settings: Settings, shape: ModelShape, setup: TrainingSetup, rank: RankMemory, memory: int, *, critic: bool
) -> str:
    facts = engine_facts(settings.rollout)
    colocated = bool(facts.shares_gpus)
    servers = facts.servers * facts.gpus_per_server
    machine = Hardware(gpus=setup.ranks if colocated else setup.ranks + servers, memory=memory)
    required = Requirements.of(settings, critic=critic)
    room = _server_share(rank, memory)
    share = facts.gpu_share or (room if colocated else _LARGEST_SHARE)
    server = server_memory(shape, memory=memory, share=share, tensor_parallel=facts.gpus_per_server)
    trains, wakes = rank.total <= usable(memory), not colocated or share <= room
    if trains and wakes and server.kv_tokens >= required.longest_request:
        return (
            f"  on {machine}: fits, {rank.total / GB:.1f} of {usable(memory) / GB:.1f} GB; micro-batches of up to "
            f"{_largest_micro_batch(shape, setup, _placement_of(facts), memory):,} tokens fit; a server holds "
            f"{server.kv_tokens:,} tokens"
        )
    lack = "the server's KV cache" if wakes else "the server beside the rank's weights"
    lack = lack if trains else "the rank's peak"
    found = find_plan(shape, machine, required)
    if found is None:
        return f"  on {machine}: does not fit ({lack}), and no other settings do: run agentrl plan for alternatives"
    changes = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in plan_values(found).items()
        if operator.attrgetter(key)(settings) != value
    ]
    return f"  on {machine}: does not fit ({lack}); would fit with {' '.join(changes)}"
