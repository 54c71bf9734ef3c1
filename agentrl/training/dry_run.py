"""``--dry-run``: the resolved settings, the plan of passes and an estimate of memory; nothing is run or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentrl.config import dump_yaml
from agentrl.models.loading import read_config
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.training.estimate import estimate_memory, planned_passes
from agentrl.training.preflight import check_inputs

if TYPE_CHECKING:
    from agentrl.config import Settings


def dry_run(settings: Settings) -> None:
    """Print what ``agentrl train`` would do with these settings."""
    problems = check_inputs(settings)
    console = Console(settings.telemetry)
    console.note(dump_yaml(settings).rstrip())
    console.note("")
    for line in [*describe_machine().lines(), *problems]:
        console.note(line)
    console.note(f"passes: {planned_passes(settings).describe()}")
    config = read_config(settings.model)
    if config is None:
        console.note(f"memory: not estimated, the configuration of {settings.model.path} cannot be read here")
        return
    parameters = _count(config)
    console.note(f"model: {parameters / 1e6:,.2f}M parameters; memory of one rank, estimated:")
    for line in estimate_memory(settings, config, parameters).lines():
        console.note(line)


def _count(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(item.numel() for item in AutoModelForCausalLM.from_config(config).parameters())
