"""``agentrl plan`` and the dry run's estimate: whether a run fits on its GPUs and, if not, which settings save memory.

Both estimates are for the given settings. No other settings are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import yaml

from agentrl.config import Settings
from agentrl.errors import SettingsError
from agentrl.models.attention import reason_sequence_parallel_unsupported, reason_too_long_to_pack
from agentrl.models.shape import ModelShape, read_model_shape
from agentrl.planning.memory import (
    CONTEXT,
    GB,
    RankMemory,
    TrainingSetup,
    rank_memory,
    server_cache_tokens,
    usable_gpu_bytes,
)
from agentrl.rollout.engines.base import EngineFacts, engine_facts
from agentrl.rollout.settings import longest_request_tokens

_LARGEST_SHARE = 0.85
_ASSUMED_SIZES = (80, 48)  # GB of the GPUs that a dry run assumes on a machine without a GPU
_OVERLAY: dict[str, Any] = {  # the settings that a plan writes
    "model": {"path", "dtype", "gradient_checkpointing", "checkpoint_offload", "lora"},
    "rollout": dict.fromkeys(("max_prompt_tokens", "max_response_tokens", "max_turn_tokens", "engine"), True)
    | {"vllm": {"placement", "replicas", "tensor_parallel_size", "gpu_memory_utilization"}},
    "training": {"num_processes", "zero_stage", "micro_batch_tokens", "offload", "sequence_parallel"},
}

_WEIGHTS = "training.zero_stage=3, then training.offload=all"
_TOKENS = "training.sequence_parallel, shorter trajectories with a lower training.micro_batch_tokens"
_LOWERED_BY = {  # components of RankMemory, and settings that lower them
    "weights": _WEIGHTS,
    "reference": f"{_WEIGHTS}, model.lora.rank",
    "teacher": f"{_WEIGHTS}, teacher.url",
    "critic": "an algorithm.estimator without a critic",
    "activations": f"model.gradient_checkpointing, then model.checkpoint_offload, {_TOKENS}",
    **dict.fromkeys(("backward", "head"), _TOKENS),
    **dict.fromkeys(("master copy", "optimizer"), "training.offload=optimizer, model.lora.rank, more GPUs"),
    **dict.fromkeys(("gradients", "gradient bucket", "reduction", "step"), "model.lora.rank, more GPUs"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Ranks and servers of a run on GPUs of ``memory`` bytes, with estimates of their memory."""

    shape: ModelShape
    setup: TrainingSetup
    engine: EngineFacts
    memory: int
    longest_request_tokens: int  # tokens that a server must hold, evaluations included
    kv_tokens: int  # tokens in the cache of the built-in engine

    @property
    def machine(self) -> str:
        servers = 0 if self.engine.shares_gpus else self.engine.servers
        gpus = self.setup.ranks + servers * self.engine.gpus_per_server
        return f"{gpus} {'GPU' if gpus == 1 else 'GPUs'} of {self.memory / GB:g} GB"

    @property
    def rank(self) -> RankMemory:
        # A sleeping server keeps its CUDA context on the GPU of a rank.
        contexts = 0 if self.setup.device == "cpu" else 2 if self.engine.shares_gpus else 1
        return rank_memory(self.shape, self.setup, kv_tokens=self.kv_tokens, context=contexts * CONTEXT)

    @property
    def largest_server_share(self) -> float:
        """The largest fraction of a GPU's memory that a server can use, in steps of 0.05.

        A colocated rank keeps its weights loaded.
        """
        if not self.engine.shares_gpus:
            return _LARGEST_SHARE
        static = self.rank.static
        kept = static["weights"] * (2 if static["critic"] else 1) + static["gathered weights"]
        kept += static["reference"] + static["teacher"]
        share = min(_LARGEST_SHARE, (usable_gpu_bytes(self.memory) - kept - CONTEXT) / self.memory)
        return max(0.0, math.floor(20 * share + 1e-9) / 20)

    @property
    def server_memory_share(self) -> float:
        """Fraction of a GPU's memory for a server: the engine's setting or, if unset, the largest that fits."""
        return self.largest_server_share if self.engine.gpu_share is None else self.engine.gpu_share

    @property
    def server_cache_tokens(self) -> int:
        return server_cache_tokens(
            self.shape, memory=self.memory, share=self.server_memory_share, gpus=self.engine.gpus_per_server
        )

    @property
    def largest_micro_batch(self) -> int:
        """Number of tokens of the largest micro-batch that fits.

        At least the configured number, and at most 65,536, which saturates a GPU.
        """
        for tokens in range(65_536, self.setup.tokens, -1024):
            if replace(self, setup=replace(self.setup, tokens=tokens)).rank.total <= usable_gpu_bytes(self.memory):
                return tokens
        return self.setup.tokens

    def describe_shortage(self) -> str | None:
        """Describe what does not fit, and the settings that save memory. Returns None if ranks and servers fit."""
        rank, usable = self.rank, usable_gpu_bytes(self.memory)
        if rank.total > usable:
            lines = [
                f"a rank needs {rank.total / GB:.1f} GB at the {rank.busiest_phase}, but may use {usable / GB:.1f} GB; "
                "its largest parts, and settings that lower them:"
            ]
            lowered = [item for item in rank.peak_parts.items() if item[0] in _LOWERED_BY]
            for name, size in sorted(lowered, key=itemgetter(1), reverse=True)[:4]:
                lines.append(f"    {name}, {size / GB:.1f} GB: {_LOWERED_BY[name]}")
            return "\n".join(lines)
        share = self.server_memory_share
        if self.engine.shares_gpus and share > self.largest_server_share:
            return (
                f"a server takes {share:g} of a GPU, but a rank's weights leave only {self.largest_server_share:g}: "
                "lower rollout.vllm.gpu_memory_utilization"
            )
        if self.server_cache_tokens < self.longest_request_tokens:
            remedies = ["raise rollout.vllm.tensor_parallel_size"]
            if share < self.largest_server_share:
                remedies.insert(0, f"raise rollout.vllm.gpu_memory_utilization to up to {self.largest_server_share:g}")
            if self.engine.shares_gpus:
                remedies.append("set rollout.engine=vllm and rollout.vllm.placement=dedicated")
            return (
                f"a server holds {self.server_cache_tokens:,} tokens in {share:g} of a GPU, but a request has up to "
                f"{self.longest_request_tokens:,}: {', '.join(remedies)}, or lower rollout.max_response_tokens and "
                "evaluation.max_response_tokens"
            )
        return None

    def describe_fit(self) -> str:
        """Return one line if the plan fits, or else a description of the shortage."""
        shortage = self.describe_shortage()
        if shortage is not None:
            return f"on {self.machine}: does not fit: {shortage}"
        return (
            f"on {self.machine}: fits, {self.rank.total / GB:.1f} of {usable_gpu_bytes(self.memory) / GB:.1f} GB; "
            f"micro-batches of up to {self.largest_micro_batch:,} tokens fit; "
            f"a server holds {self.server_cache_tokens:,} tokens"
        )


def plan_command(
    settings: Settings,
    *,
    critic: bool,
    gpus: int | None = None,
    memory: float | None = None,
    context: int | None = None,
    base: list[str] | None = None,
    write: Path | None = None,
) -> list[str]:
    """Return the output lines of ``agentrl plan``, and write the overlay to ``write`` if it is set.

    ``memory``: GB of a GPU; ``context``: tokens of prompt and response; ``base``: overlays that the plan extends.
    Raises SettingsError if the settings do not fit.
    """
    rollout, training = settings.rollout, settings.training
    if settings.model.path is None:
        raise SettingsError("no model to plan for: set --model DIRECTORY, FILE.json or OWNER/NAME, or --config FILE")
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if memory is None and not here:
        raise SettingsError(
            "this machine has no GPU: set the number and memory of the GPUs, for example --gpus 8 --memory 80"
        )
    size = torch.cuda.get_device_properties(0).total_memory if memory is None else int(memory * GB)
    gpus = gpus or here or training.num_processes
    if context is not None:
        prompt = min(rollout.max_prompt_tokens, context // 2)
        limits = {"max_prompt_tokens": prompt, "max_response_tokens": context - prompt}
        limits["max_turn_tokens"] = min(rollout.max_turn_tokens, context - prompt)
        rollout = rollout.model_copy(update=limits)
    # DeepSpeed frees the GPU for a colocated server only at stages 1 and 2. Dedicated servers get half of the GPUs.
    facts, stage = engine_facts(rollout), training.effective_zero_stage(bfloat16=settings.model.dtype == "bfloat16")
    colocated = stage in (1, 2) and bool(facts.in_process or facts.shares_gpus)
    ranks = gpus if colocated else gpus - gpus // 2
    servers = (gpus if colocated else gpus // 2) // rollout.vllm.tensor_parallel_size
    if not servers:
        raise SettingsError(
            f"--gpus {gpus} is too few: each server needs rollout.vllm.tensor_parallel_size GPUs, and servers get half "
            "of the GPUs unless training.zero_stage is 1 or 2 and rollout.vllm.placement=colocated. Use more GPUs, or "
            "change these settings"
        )
    placed = {"placement": "colocated" if colocated else "dedicated", "replicas": servers}
    rollout = rollout.model_copy(update={"engine": "vllm", "vllm": rollout.vllm.model_copy(update=placed)})
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    training = training.model_copy(update={"num_processes": ranks, "micro_batch_tokens": longest})
    settings = settings.model_copy(update={"rollout": rollout, "training": training})
    shape = read_model_shape(settings.model)
    plan = _make_plan(settings, shape, critic=critic, memory=size)
    _check_parallel_sizes(settings, shape)
    if (too_long := reason_too_long_to_pack(shape.config, plan.longest_request_tokens)) is not None:
        raise SettingsError(too_long)
    if plan.describe_shortage() is not None:
        raise SettingsError(f"{shape.name} with trajectories of {longest} tokens {plan.describe_fit()}")
    plan = replace(plan, setup=replace(plan.setup, tokens=plan.largest_micro_batch))
    overlay = settings.model_dump(mode="json", include=_OVERLAY)
    if not settings.model.lora.rank:
        del overlay["model"]["lora"]
    overlay["training"]["micro_batch_tokens"] = plan.setup.tokens
    overlay["rollout"]["vllm"]["gpu_memory_utilization"] = plan.server_memory_share
    text = f"# {shape.name} on {plan.machine}, {longest} tokens: written by agentrl plan\n"
    text += yaml.safe_dump(({"base": base} if base else {}) | overlay, sort_keys=False)
    lines = [f"# {line}" for line in _format_estimate([plan])]
    if write is None:
        return [*lines, *text.splitlines()]
    try:
        write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--write {write}: {error.strerror}; choose a file in an existing folder") from error
    return [*lines, f"# written to {write}: agentrl train --config {write}"]


def _check_parallel_sizes(settings: Settings, shape: ModelShape) -> None:
    """Raise SettingsError if the ranks or heads cannot be divided as sequence or tensor parallelism requires."""
    training, parallel = settings.training, settings.rollout.vllm.tensor_parallel_size
    if training.num_processes % training.sequence_parallel:
        raise SettingsError(
            f"training.sequence_parallel={training.sequence_parallel} does not divide the {training.num_processes} "
            "training ranks of these GPUs: change this setting or --gpus"
        )
    if (reason := reason_sequence_parallel_unsupported(shape.config, training.sequence_parallel)) is not None:
        raise SettingsError(reason)
    if shape.heads % parallel:
        raise SettingsError(
            f"rollout.vllm.tensor_parallel_size={parallel} does not divide the model's {shape.heads} query heads"
        )


def memory_estimate_lines(settings: Settings, shape: ModelShape, *, critic: bool) -> Iterator[str]:
    """Return the dry run's lines about memory: the estimate of a rank and, with servers, whether the run fits."""
    gpu = torch.cuda.is_available()
    sizes = [torch.cuda.get_device_properties(0).total_memory] if gpu else [size * GB for size in _ASSUMED_SIZES]
    return _format_estimate([_make_plan(settings, shape, critic=critic, memory=size) for size in sizes])


def _format_estimate(plans: list[Plan]) -> Iterator[str]:
    yield f"model: {plans[0].shape.parameters / 1e6:,.2f}M parameters; memory of one rank, estimated:"
    yield from plans[0].rank.format_parts()
    for plan in plans if plans[0].engine.servers else []:
        yield f"  {plan.describe_fit()}"


def _make_plan(settings: Settings, shape: ModelShape, *, critic: bool, memory: int) -> Plan:
    model, training, teacher, rollout = settings.model, settings.training, settings.teacher, settings.rollout
    facts = engine_facts(rollout)
    bfloat16, on_gpus = model.dtype == "bfloat16", torch.cuda.is_available() or bool(facts.servers)
    fastest = "triton" if on_gpus else "chunked"
    teachers = {path or model.path for path in teacher.local_paths} - ({model.path} if model.lora.rank else set())
    setup = TrainingSetup(
        ranks=training.num_processes,
        stage=training.effective_zero_stage(bfloat16=bfloat16),
        bfloat16=bfloat16,
        tokens=training.micro_batch_tokens,
        checkpointing=model.gradient_checkpointing,
        checkpoint_offload=model.checkpoint_offload,
        offload=training.offload,
        sequence_parallel=training.sequence_parallel,
        lora_rank=model.lora.rank,
        head_backend=fastest if training.head_backend == "auto" else training.head_backend,
        device="cuda" if on_gpus else "cpu",
        reference=settings.kl.coefficient > 0,
        teacher=sum(read_model_shape(model.model_copy(update={"path": path})).parameters for path in teachers),
        critic=critic,
    )
    # The transformers engine's cache holds at most all concurrent trajectories at their maximum length.
    in_step = rollout.problems_per_step * rollout.group_size * rollout.branching.max_live_branches
    rows = min(rollout.concurrency, in_step)
    return Plan(
        shape=shape,
        setup=setup,
        engine=facts,
        memory=memory,
        longest_request_tokens=longest_request_tokens(rollout, settings.evaluation.max_response_tokens),
        kv_tokens=min(facts.kv_slots or 0, rows * (rollout.max_prompt_tokens + rollout.max_response_tokens)),
    )
