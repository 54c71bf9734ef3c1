"""A plan as settings: a YAML overlay that `agentrl train --config` takes, and the settings that it starts from."""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Sequence
from typing import Literal

import yaml

from agentrl.config import Settings
from agentrl.planning.memory import TrainingSetup
from agentrl.planning.search import LORA_RANK, Plan, Wish
from agentrl.rollout.engines.vllm.servers import longest_request

Values = dict[str, object]
"""Settings by dotted key."""


def setup_of(
    settings: Settings, *, backend: Literal["chunked", "triton"], critic: bool, tokens: int | None = None
) -> TrainingSetup:
    """How these settings train. ``backend``: what ``training.head_backend=auto`` selects on the machine in question."""
    training, bfloat16 = settings.training, settings.model.dtype == "bfloat16"
    return TrainingSetup(
        ranks=training.num_processes,
        stage=training.stage_that_runs(bfloat16=bfloat16),
        bfloat16=bfloat16,
        tokens=tokens or training.micro_batch_tokens,
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


def may_adapt() -> bool:
    """Whether peft, which makes adapters, is here."""
    return importlib.util.find_spec("peft") is not None


def wish_of(settings: Settings, *, critic: bool, only_adapt: bool = False) -> Wish:
    """What a plan for these settings keeps and may use."""
    rollout = settings.rollout
    given = rollout.vllm.tensor_parallel_size if rollout.engine == "vllm" else 1
    return Wish(
        context=rollout.max_prompt_tokens + rollout.max_response_tokens,
        longest_request=longest_request(rollout, settings.evaluation.max_response_tokens),
        bfloat16=settings.model.dtype == "bfloat16",
        reference=settings.kl.coefficient > 0,
        critic=critic,
        tensor_parallel=given if given > 1 else None,
        may_offload=True,
        may_adapt=may_adapt(),
        only_adapt=only_adapt or settings.model.lora.rank > 0,
        lora_rank=settings.model.lora.rank or LORA_RANK,
    )


def plan_values(plan: Plan) -> Values:
    """The settings of a plan."""
    setup = plan.setup
    values: Values = {
        "model.dtype": "bfloat16" if setup.bfloat16 else "float32",
        "model.gradient_checkpointing": setup.checkpointing,
        "model.checkpoint_offload": setup.checkpoint_offload,
        "rollout.engine": "vllm",
        "rollout.vllm.placement": plan.placement,
        "rollout.vllm.replicas": plan.replicas,
        "rollout.vllm.tensor_parallel_size": plan.tensor_parallel,
        "rollout.vllm.gpu_memory_utilization": plan.share,
        "training.num_processes": setup.ranks,
        "training.zero_stage": setup.stage,
        "training.micro_batch_tokens": setup.tokens,
        "training.offload": setup.offload,
        "training.sequence_parallel": setup.sequence_parallel,
    }
    if setup.lora_rank:
        values["model.lora.rank"] = setup.lora_rank
    return values


def changed_values(settings: Settings, values: Values) -> Values:
    """Those of ``values`` that differ from the settings."""
    return {key: value for key, value in values.items() if operator.attrgetter(key)(settings) != value}


def overlay_text(values: Values, *, base: Sequence[str], title: str) -> str:
    """YAML with a comment on top; ``base`` names the configurations that it changes."""
    nested: dict[str, object] = {"base": base[0] if len(base) == 1 else [*base]} if base else {}
    for key, value in values.items():
        *sections, name = key.split(".")
        here = nested
        for section in sections:
            inner = here.setdefault(section, {})
            assert isinstance(inner, dict)
            here = inner
        here[name] = value
    return f"# {title}\n{yaml.safe_dump(nested, sort_keys=False)}"
