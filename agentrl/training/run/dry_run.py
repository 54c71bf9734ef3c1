"""``--dry-run``: print the resolved settings, the planned passes and a memory estimate. Nothing is run or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentrl.config import dump_yaml
from agentrl.models.loading import read_config
from agentrl.rollout.engines.table import engine_facts
from agentrl.rollout.engines.transformers import TOO_LARGE, is_too_large
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.training.run.estimate import estimate_memory, planned_passes
from agentrl.training.run.preflight import check_inputs, machine_problems

if TYPE_CHECKING:
    from agentrl.config import Settings


def dry_run(settings: Settings) -> None:
    """Print what ``agentrl train`` would run with these settings."""
    problems = check_inputs(settings)
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


def _count(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(item.numel() for item in AutoModelForCausalLM.from_config(config).parameters())
