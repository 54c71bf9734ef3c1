"""``--dry-run``: print the resolved settings, the planned passes and a memory estimate. Nothing is trained or written.

Where the demonstrations are the user's own, it plays them, so that their lengths and those of prompts are measured.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from agentrl.config import dump_yaml
from agentrl.errors import SettingsError
from agentrl.planning.plan import memory_lines
from agentrl.planning.shapes import config_of, read_shape
from agentrl.problems.settings import BUILTIN, FORMULA
from agentrl.rollout.engines.registry import engine_facts
from agentrl.rollout.engines.transformers import TOO_LARGE, is_too_large
from agentrl.rollout.gateway.settings import is_agent
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.training.coldstart.limits import measured_problems
from agentrl.training.coldstart.train import measure
from agentrl.training.run.launch import show_plan
from agentrl.training.run.preflight import check_inputs, machine_problems
from agentrl.training.step.batching import describe_passes
from agentrl.training.step.objective_settings import ObjectiveSettings, needs

if TYPE_CHECKING:
    from agentrl.config import Settings


def dry_run(settings: Settings) -> None:
    """Print what ``agentrl train`` would run with these settings."""
    problems = check_inputs(settings)
    shown = settings.coldstart.demonstrations
    if shown is not None and not shown.startswith((BUILTIN, FORMULA)) and not is_agent(settings.env):
        asyncio.run(measure(settings, measured_problems(settings)))
    console = Console(settings.telemetry)
    console.note(dump_yaml(settings).rstrip())
    console.note("")
    for line in [*describe_machine().lines(), *problems]:
        console.note(line)
    console.note(f"rollouts: {engine_facts(settings.rollout).about}")
    longest = settings.rollout.max_prompt_tokens + settings.rollout.max_response_tokens
    passes = describe_passes(
        ObjectiveSettings.of(settings),
        group_tokens=settings.rollout.group_size * longest,
        budget=settings.training.micro_batch_tokens,
    )
    console.note(f"passes: {passes}")
    for problem in machine_problems(settings):
        console.warning(f"not on this machine: {problem}")
    if settings.cluster.kind == "ray":
        show_plan(settings, console)
    try:
        config_of(settings.model)
    except SettingsError as error:
        console.note(f"memory: not estimated: {error}")
        return
    shape = read_shape(settings.model)  # whose errors are the user's
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if engine_facts(settings.rollout).in_process and is_too_large(shape.parameters, device):
        console.warning(TOO_LARGE)
    critic = "values" in needs(ObjectiveSettings.of(settings)).inputs
    for line in memory_lines(settings, shape, critic=critic):
        console.note(line)
