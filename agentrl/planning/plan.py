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

import torch
import yaml

from agentrl.config import Settings
from agentrl.errors import SettingsError
from agentrl.models.attention import reason_rows_not_shareable, reason_too_long_to_pack
from agentrl.planning.memory import (
    CONTEXT,
    GB,
    ModelShape,
    RankMemory,
    TrainingSetup,
    memory_lines,
    rank_memory,
    read_shape,
    server_memory,
    usable_bytes,
)
from agentrl.rollout.engines.base import engine_facts
from agentrl.rollout.settings import longest_request
from agentrl_envs.registry import install_extra

_LORA_RANK = 32  # rank of proposed adapters; published reinforcement learning uses 1 to 32
_TOKEN_STEP = 1024  # planned micro-batches are multiples of this number of tokens
_MOST_STEPS = 64  # limit of a planned micro-batch, which already saturates a GPU
_LARGEST_SHARE = 0.85
_SHORTEST = 64
_SIZES = (80, 48)  # GB of the GPUs that a dry run assumes on a machine without a GPU

# The choices of a plan, with factors on the time of a step. Recomputing the forward adds one third. Checkpoints in host
# memory cross the bus twice: for 7B, 0.4 MB per token, 16 us at 25 GB/s, compared with 150 us of computation. Stage 3
# sends 50 % more (arXiv 1910.02054, section 7). Offloaded states cross the bus in each step, offloaded weights in each
# micro-batch (arXiv 2104.07857). Two sequence-parallel ranks send up to 4 D numbers of two bytes per token and layer,
# half of them to the other rank, in forward and backward: for 7B, 40 us per token at 20 GB/s (no NVLink), compared with
# 110 us of computation at 400 TFLOP/s. Dedicated servers halve the GPUs that train, and are idle during training.
_STAGES = {2: 1.0, 3: 1.15}
_CHECKPOINTS = {(False, False): 1.0, (True, False): 4 / 3, (True, True): 4 / 3 * 1.1}
_OFFLOADS = {"none": 1.0, "optimizer": 1.3, "all": 3.0}
_SHARED = {1: 1.0, 2: 1.37, 4: 1.39, 8: 1.43}
_COLOCATED = {True: 1.0, False: 2.0}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The GPUs, the settings that a plan must not change, and the adapters that it may use."""

    gpus: int
    memory: int  # bytes per GPU
    context: int  # tokens of the longest trajectory, prompt and response
    longest_request: int  # tokens that a server must hold, evaluations included
    bfloat16: bool = True
    reference: bool = False
    teacher: int = 0  # parameters
    critic: bool = False
    tensor_parallel: int | None = None  # None: the smallest size that fits
    lora_ranks: tuple[int, ...] = (0,)  # 0: all weights are trained

    @classmethod
    def of(cls, settings: Settings, *, gpus: int, memory: int, critic: bool, only_adapt: bool = False) -> Target:
        rollout, lora = settings.rollout, settings.model.lora.rank
        parallel = engine_facts(rollout).gpus_per_server
        adapters = (lora or _LORA_RANK,)
        return cls(
            gpus=gpus,
            memory=memory,
            context=rollout.max_prompt_tokens + rollout.max_response_tokens,
            longest_request=longest_request(rollout, settings.evaluation.max_response_tokens),
            bfloat16=settings.model.dtype == "bfloat16",
            reference=settings.kl.coefficient > 0,
            teacher=_teacher_parameters(settings),
            critic=critic,
            tensor_parallel=parallel if parallel > 1 else None,
            lora_ranks=adapters if only_adapt or lora else (0, *adapters) if _has_peft() else (0,),
        )

    @property
    def machine(self) -> str:
        return f"{self.gpus} {'GPU' if self.gpus == 1 else 'GPUs'} of {self.memory / GB:g} GB"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of ranks and servers on GPUs of ``memory`` bytes, with the estimates of their memory."""

    shape: ModelShape
    setup: TrainingSetup
    colocated: bool  # servers run on the GPUs of the ranks
    replicas: int
    tensor_parallel: int
    memory: int
    share: float | None = None  # of a server's GPU; None: the largest that fits

    @property
    def rank(self) -> RankMemory:
        # A sleeping server keeps its CUDA context on the GPU of a rank.
        return rank_memory(self.shape, self.setup, context=(1 + self.colocated) * CONTEXT)

    @property
    def server(self) -> tuple[dict[str, int], int]:
        """The parts of a server's memory, and the tokens that the server holds."""
        share = self.largest_share if self.share is None else self.share
        return server_memory(self.shape, memory=self.memory, share=share, tensor_parallel=self.tensor_parallel)

    @property
    def largest_share(self) -> float:
        """A server's fraction of the GPU, in steps of 0.05, beside the loaded weights of a colocated rank."""
        if not self.colocated:
            return _LARGEST_SHARE
        static = self.rank.static
        kept = static["weights"] * (2 if static["critic"] else 1) + static["gathered weights"]
        kept += static["reference"] + static["teacher"]
        share = min(_LARGEST_SHARE, (usable_bytes(self.memory) - kept - CONTEXT) / self.memory)
        return max(0.0, math.floor(20 * share + 1e-9) / 20)

    @property
    def largest_micro_batch(self) -> int:
        """Tokens of the largest micro-batch that fits, a multiple of 1,024 up to 65,536, or 0."""
        sizes = range(_MOST_STEPS * _TOKEN_STEP, 0, -_TOKEN_STEP)
        plans = (replace(self, setup=replace(self.setup, tokens=tokens)) for tokens in sizes)
        return next((plan.setup.tokens for plan in plans if plan.rank.total <= usable_bytes(self.memory)), 0)

    def reason_infeasible(self, longest_request: int) -> str | None:
        """Return what does not fit, or None."""
        if self.rank.total > usable_bytes(self.memory):
            return "the rank's peak"
        if self.colocated and self.share is not None and self.share > self.largest_share:
            return "the server beside the rank's weights"
        return None if self.server[1] >= longest_request else "the server's KV cache"

    def values(self) -> dict[str, object]:
        """Return the settings of the plan by dotted key."""
        setup = self.setup
        values: dict[str, object] = {
            "model.dtype": "bfloat16" if setup.bfloat16 else "float32",
            "model.gradient_checkpointing": setup.checkpointing,
            "model.checkpoint_offload": setup.checkpoint_offload,
            "rollout.engine": "vllm",
            "rollout.vllm.placement": "colocated" if self.colocated else "dedicated",
            "rollout.vllm.replicas": self.replicas,
            "rollout.vllm.tensor_parallel_size": self.tensor_parallel,
            "rollout.vllm.gpu_memory_utilization": self.largest_share if self.share is None else self.share,
            "training.num_processes": setup.ranks,
            "training.zero_stage": setup.stage,
            "training.micro_batch_tokens": setup.tokens,
            "training.offload": setup.offload,
            "training.sequence_parallel": setup.sequence_parallel,
        }
        return values | ({"model.lora.rank": setup.lora_rank} if setup.lora_rank else {})


def find_plan(shape: ModelShape, target: Target) -> Plan | None:
    """Return the cheapest settings that fit, or None."""
    for _, plan in sorted(_candidates(shape, target), key=operator.itemgetter(0)):
        gpus = plan.replicas
        for parallel in (target.tensor_parallel,) if target.tensor_parallel else (1, 2, 4, 8):
            plan = replace(plan, tensor_parallel=parallel, replicas=gpus // parallel)
            divides = gpus % parallel == 0 and shape.heads % parallel == 0
            if divides and plan.reason_infeasible(target.longest_request) is None:
                return replace(plan, setup=replace(plan.setup, tokens=max(target.context, plan.largest_micro_batch)))
    return None


def _candidates(shape: ModelShape, target: Target) -> Iterator[tuple[tuple[bool, float], Plan]]:
    """Yield every combination that DeepSpeed and the model support, with servers of one GPU, and its cost.

    Adapters are the last resort, because they train different parameters. DeepSpeed frees the GPU for a colocated
    server at stages 1 and 2 only, and offloads weights at stage 3 only.
    """
    for stage, checkpoints, offload, shared, colocated, lora in itertools.product(
        _STAGES, _CHECKPOINTS, _OFFLOADS, _SHARED, _COLOCATED, target.lora_ranks
    ):
        servers = target.gpus if colocated else target.gpus // 2
        ranks = target.gpus if colocated else target.gpus - servers
        if not servers or (stage == 3 and (colocated or ranks == 1)) or (offload == "all" and stage < 3):
            continue
        if ranks % shared or reason_rows_not_shareable(shape.config, shared) is not None:
            continue
        setup = TrainingSetup(
            ranks=ranks,
            stage=stage,
            bfloat16=target.bfloat16,
            tokens=target.context,
            checkpointing=checkpoints[0],
            checkpoint_offload=checkpoints[1],
            offload=offload,  # type: ignore[arg-type]
            sequence_parallel=shared,
            lora_rank=lora,
            reference=target.reference,
            teacher=target.teacher,
            critic=target.critic,
        )
        cost = _STAGES[stage] * _CHECKPOINTS[checkpoints] * _OFFLOADS[offload] * _SHARED[shared] * _COLOCATED[colocated]
        yield (
            (lora > 0, cost),
            Plan(
                shape=shape,
                setup=setup,
                colocated=colocated,
                replicas=servers,
                tensor_parallel=1,
                memory=target.memory,
            ),
        )


def find_plan_or_raise(shape: ModelShape, target: Target) -> Plan:
    """Return the cheapest plan. Raises SettingsError if none fits, with hardware and a context that would fit."""
    found = find_plan(shape, target)
    if found is not None:
        return found
    numbers = [target.gpus << power for power in range(1, 8)]
    sizes = [size for size in (16, 24, 32, 40, 48, 80, 96, 141, 192, 288) if size * GB > target.memory]
    contexts = [target.context >> power for power in range(1, 8) if target.context >> power >= _TOKEN_STEP]
    alternatives = (
        ((f"{n} GPUs with this memory", replace(target, gpus=n)) for n in numbers),
        ((f"{size} GB per GPU", replace(target, memory=size * GB)) for size in sizes),
        ((f"a context of {n} tokens", replace(target, context=n, longest_request=n)) for n in contexts),
    )
    options = [next((name for name, other in kind if find_plan(shape, other)), None) for kind in alternatives]
    would = ", or ".join(filter(None, options))
    need = min(plan.rank.total for _, plan in _candidates(shape, target))
    raise SettingsError(
        f"no settings train {shape.name} ({shape.parameters / 1e9:,.2f}B parameters) with {target.context} tokens on "
        f"{target.machine}: a rank needs at least {need / GB:,.1f} GB, and a server must hold {target.longest_request} "
        f"tokens; {f'would fit: {would}' if would else 'even 128 times as many GPUs do not suffice'}"
    )


def plan_command(
    settings: Settings,
    *,
    critic: bool,
    gpus: int | None = None,
    memory: float | None = None,
    context: int | None = None,
    lora: bool = False,
    base: list[str] | None = None,
    write: Path | None = None,
) -> list[str]:
    """Return the output lines of ``agentrl plan``, and write the overlay to ``write`` if it is set.

    ``memory``: GB of a GPU; ``context``: tokens of prompt and response; ``base``: overlays that the plan extends.
    """
    if settings.model.path is None:
        raise SettingsError("no model to plan for: set --model DIRECTORY, FILE.json or OWNER/NAME, or --config FILE")
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = gpus if gpus is not None else here or settings.training.num_processes
    if gpus < 1:
        raise SettingsError(f"--gpus must be at least 1, for example 8; got {gpus}")
    if memory is not None and not 0 < memory < 10_000:
        raise SettingsError(f"--memory must be between 0 and 10000 GB for each GPU, for example 80; got {memory:g}")
    if memory is None and not here:
        raise SettingsError(
            "this machine has no GPU: set the number and memory of the GPUs, for example --gpus 8 --memory 80"
        )
    size = torch.cuda.get_device_properties(0).total_memory if memory is None else int(memory * GB)
    values: dict[str, object] = {"model.path": settings.model.path}
    if context is not None:
        if context < _SHORTEST:
            raise SettingsError(
                f"--context {context} is too short for a prompt and a response: set at least {_SHORTEST} tokens"
            )
        prompt = min(settings.rollout.max_prompt_tokens, context // 2)
        limits = {"max_prompt_tokens": prompt, "max_response_tokens": context - prompt}
        limits["max_turn_tokens"] = min(settings.rollout.max_turn_tokens, context - prompt)
        settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update=limits)})
        values |= {f"rollout.{key}": value for key, value in limits.items()}
    shape = read_shape(settings.model)
    target = Target.of(settings, gpus=gpus, memory=size, critic=critic, only_adapt=lora)
    if 0 not in target.lora_ranks and not _has_peft():
        raise SettingsError(
            f"adapters require the package peft: run {install_extra('lora')}, or leave out --lora and set "
            "model.lora.rank=0"
        )
    obstacle = reason_too_long_to_pack(shape.config, target.longest_request)
    if obstacle is not None:
        raise SettingsError(obstacle)
    plan = find_plan_or_raise(shape, target)
    nested: dict[str, object] = {}
    if base:
        nested["base"] = base[0] if len(base) == 1 else base
    for key, value in (values | plan.values()).items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[name] = value
    title = f"# {shape.name} on {target.machine}, {target.context} tokens: written by agentrl plan\n"
    text = title + yaml.safe_dump(nested, sort_keys=False)
    rank, (parts, tokens) = plan.rank, plan.server
    share = plan.values()["rollout.vllm.gpu_memory_utilization"]
    lines = [
        f"model: {shape.name}, {shape.parameters / 1e6:,.2f}M parameters, on {target.machine}",
        f"one rank, estimated ({rank.total / GB:.1f} of {usable_bytes(size) / GB:.1f} usable GB):",
        *rank.lines(),
        f"one GPU of a server, which holds {tokens:,} tokens, estimated:",
        *memory_lines(parts, f"total, {share:g} of the GPU"),
    ]
    lines = [f"# {line}" for line in lines]
    if write is None:
        return [*lines, *text.splitlines()]
    try:
        write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--write {write}: {error.strerror}; choose a file in an existing folder") from error
    return [*lines, f"# written to {write}: agentrl train --config {write}"]


def _teacher_parameters(settings: Settings) -> int:
    model, path = settings.model, settings.teacher.path or settings.model.path
    if not settings.teacher.active or settings.teacher.url is not None or (model.lora.rank and path == model.path):
        return 0
    return read_shape(model.model_copy(update={"path": path})).parameters


def _has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def dry_run_lines(settings: Settings, shape: ModelShape, *, critic: bool) -> Iterator[str]:
    """Yield the dry run's memory estimate of a rank and, with servers, whether both fit on the GPUs."""
    facts, rollout, training = engine_facts(settings.rollout), settings.rollout, settings.training
    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    on_gpus = here is not None or bool(facts.servers)
    bfloat16 = settings.model.dtype == "bfloat16"
    fastest = "triton" if on_gpus else "chunked"
    setup = TrainingSetup(
        ranks=training.num_processes,
        stage=training.stage_that_runs(bfloat16=bfloat16),
        bfloat16=bfloat16,
        tokens=training.micro_batch_tokens,
        checkpointing=settings.model.gradient_checkpointing,
        checkpoint_offload=settings.model.checkpoint_offload,
        offload=training.offload,
        sequence_parallel=training.sequence_parallel,
        lora_rank=settings.model.lora.rank,
        head_backend=fastest if training.head_backend == "auto" else training.head_backend,
        device="cuda" if on_gpus else "cpu",
        reference=settings.kl.coefficient > 0,
        teacher=_teacher_parameters(settings),
        critic=critic,
    )
    colocated = bool(facts.servers and facts.shares_gpus)
    # The transformers engine's cache, limited to all concurrent trajectories at maximum length.
    rows = min(rollout.concurrency, rollout.problems_per_step * rollout.group_size)
    kv_tokens = min(facts.kv_slots or 0, rows * (rollout.max_prompt_tokens + rollout.max_response_tokens))
    yield f"model: {shape.parameters / 1e6:,.2f}M parameters; memory of one rank, estimated:"
    yield from rank_memory(shape, setup, kv_tokens=kv_tokens, context=(1 + colocated) * CONTEXT * on_gpus).lines()
    gpus = setup.ranks + (0 if colocated else facts.servers * facts.gpus_per_server)
    for memory in ([size * GB for size in _SIZES] if here is None else [here]) if facts.servers else []:
        plan = Plan(
            shape=shape,
            setup=setup,
            colocated=colocated,
            replicas=facts.servers,
            tensor_parallel=facts.gpus_per_server,
            memory=memory,
            share=facts.gpu_share,
        )
        target = Target.of(settings, gpus=gpus, memory=memory, critic=critic)
        yield f"  on {target.machine}: {_verdict(settings, plan, target)}"


def _verdict(settings: Settings, plan: Plan, target: Target) -> str:
    lack = plan.reason_infeasible(target.longest_request)
    if lack is None:
        return (
            f"fits, {plan.rank.total / GB:.1f} of {usable_bytes(plan.memory) / GB:.1f} GB; micro-batches of up to "
            f"{plan.largest_micro_batch:,} tokens fit; a server holds {plan.server[1]:,} tokens"
        )
    found = find_plan(plan.shape, target)
    if found is None:
        return f"does not fit ({lack}), and no other settings do: run agentrl plan for alternatives"
    changes = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in found.values().items()
        if operator.attrgetter(key)(settings) != value
    ]
    return f"does not fit ({lack}); would fit with {' '.join(changes)}"
