"""``--dry-run``: print the resolved settings, the planned passes and a memory estimate. Nothing is trained or written.

Where a class is to learn from demonstrations, it plays them, so that their lengths and those of prompts are measured.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentrl.config import dump_yaml
from agentrl.models.loading import read_config
from agentrl.rollout.engines.table import engine_facts
from agentrl.rollout.engines.transformers import TOO_LARGE, is_too_large
from agentrl.rollout.environment import class_factory
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.training.coldstart.limits import measured_problems
from agentrl.training.coldstart.train import measure
from agentrl.training.engine.deepspeed_engine import deepspeed_stage
from agentrl.training.run.preflight import check_inputs, machine_problems
from agentrl.training.step.batching import PassPlan, plan_passes
from agentrl.training.step.objective_settings import ObjectiveSettings, needs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from agentrl.config import Settings

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one training rank needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # rough: without attention's buffers and fragmentation
    kv_cache: int
    reference: int  # the frozen weights of a KL penalty
    critic: int  # weights, gradients and optimizer of estimator gae's

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def lines(self) -> list[str]:
        """For the console, in MiB."""
        parts = {name: size for name, size in vars(self).items() if size or name not in ("reference", "critic")}
        return [f"  {name:<12} {size / 2**20:12,.1f} MiB" for name, size in {**parts, "total": self.total}.items()]


def estimate_memory(settings: Settings, config: PreTrainedConfig, parameters: int) -> MemoryEstimate:
    """The estimate for a model with ``parameters`` parameters and a `transformers` ``config``.

    ZeRO 1 shards the optimizer's state over the ranks, 2 also the gradients, 3 also the weights. Gradients are float32;
    with bfloat16 the optimizer also holds float32 weights in addition to its two moments.
    """
    size = _BYTES[settings.model.dtype]
    bfloat16 = settings.model.dtype == "bfloat16"
    ranks, stage = settings.training.num_processes, deepspeed_stage(settings.training.zero_stage, bfloat16=bfloat16)
    master = 4 if bfloat16 else 0
    tokens = settings.training.micro_batch_tokens
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Per layer and token: normed inputs, q, k, v, attention output, two residuals, three of the feed-forward.
    kept = 6 * config.hidden_size + 2 * heads * head_dim + 3 * config.intermediate_size
    if settings.model.gradient_checkpointing:
        kept = config.hidden_size + kept // config.num_hidden_layers
    rows = min(settings.rollout.concurrency, settings.rollout.problems_per_step * settings.rollout.group_size)
    longest = settings.rollout.max_prompt_tokens + settings.rollout.max_response_tokens
    slots = min(engine_facts(settings.rollout).kv_slots or 0, rows * longest)
    weights = parameters * size // (ranks if stage == 3 else 1)
    gradients = parameters * 4 // (ranks if stage >= 2 else 1)
    optimizer = parameters * (8 + master) // (ranks if stage >= 1 else 1)
    with_critic = "values" in needs(ObjectiveSettings.of(settings)).inputs
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=weights if settings.kl.coefficient else 0,
        critic=weights + gradients + optimizer if with_critic else 0,
        activations=tokens * kept * config.num_hidden_layers * size,
        kv_cache=slots * 2 * config.num_hidden_layers * heads * head_dim * size,
    )


def planned_passes(settings: Settings) -> PassPlan:
    """The passes of a step in which every trajectory has its maximum length."""
    longest = settings.rollout.max_prompt_tokens + settings.rollout.max_response_tokens
    return plan_passes(
        ObjectiveSettings.of(settings),
        group_tokens=settings.rollout.group_size * longest,
        budget=settings.training.micro_batch_tokens,
    )


def dry_run(settings: Settings) -> None:
    """Print what ``agentrl train`` would run with these settings."""
    problems = check_inputs(settings)
    if settings.coldstart.demonstrations is not None and class_factory(settings.env) is not None:
        asyncio.run(measure(settings, measured_problems(settings)))
    console = Console(settings.telemetry)
    console.note(dump_yaml(settings).rstrip())
    console.note("")
    for line in [*describe_machine().lines(), *problems]:
        console.note(line)
    console.note(f"rollouts: {engine_facts(settings.rollout).about}")
    console.note(f"passes: {planned_passes(settings).describe()}")
    for problem in machine_problems(settings):
        console.warning(f"not on this machine: {problem}")
    config = read_config(settings.model)
    if config is None:
        console.note(f"memory: not estimated, because the configuration of {settings.model.path} cannot be read here")
        return
    parameters = _count(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if engine_facts(settings.rollout).in_process and is_too_large(parameters, device):
        console.warning(TOO_LARGE)
    console.note(f"model: {parameters / 1e6:,.2f}M parameters; memory of one rank, estimated:")
    for line in estimate_memory(settings, config, parameters).lines():
        console.note(line)


def _count(config: PreTrainedConfig) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(item.numel() for item in AutoModelForCausalLM.from_config(config).parameters())
