"""``agentrl plan``: what a model needs on given GPUs, and an overlay of the cheapest settings that fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.config import Settings
from agentrl.errors import SettingsError
from agentrl.models.attention import length_obstacle
from agentrl.planning.memory import GB, ModelShape
from agentrl.planning.overlay import Values, may_adapt, overlay_text, plan_values, wish_of
from agentrl.planning.report import plan_lines
from agentrl.planning.search import Hardware, Plan, Wish, find_plan, nearest_that_fits, smallest_need
from agentrl.planning.shapes import read_shape
from agentrl_envs.registry import install_extra

_SHORTEST = 64


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of ``agentrl plan``; None where one was not given."""

    gpus: int | None = None
    memory: float | None = None  # GB of each
    context: int | None = None  # tokens of prompt and response
    lora: bool = False
    base: tuple[str, ...] = ()  # each --config, which the overlay changes
    write: Path | None = None


def machine_of(request: PlanRequest, settings: Settings) -> Hardware:
    """The GPUs that are named, else those that are here."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = request.gpus if request.gpus is not None else here or settings.training.num_processes
    if gpus < 1:
        raise SettingsError(f"--gpus {gpus}: the number of GPUs of the run; valid: 1 and more, for example 8")
    if request.memory is not None:
        if not 0 < request.memory < 10_000:
            raise SettingsError(
                f"--memory {request.memory:g}: the memory of one GPU in GB; valid: a number above 0, for example 80"
            )
        return Hardware(gpus=gpus, memory=int(request.memory * GB))
    if not here:
        raise SettingsError("there is no GPU here: say how much memory one has, for example --gpus 8 --memory 80")
    return Hardware(gpus=gpus, memory=torch.cuda.get_device_properties(0).total_memory)


def plan_for(shape: ModelShape, machine: Hardware, wish: Wish) -> Plan:
    """The cheapest plan that fits. Raises SettingsError that says what would."""
    found = find_plan(shape, machine, wish)
    if found is not None:
        return found
    need = smallest_need(shape, machine, wish)
    options = nearest_that_fits(shape, machine, wish)
    would = f"what would fit: {', or '.join(options)}" if options else "no number of GPUs up to 128 times as large fits"
    raise SettingsError(
        f"no setting trains {shape.name} ({shape.parameters / 1e9:,.2f}B parameters) with {wish.context} tokens on "
        f"{machine}: a rank needs at least {need / GB:,.1f} GB, and a server must hold {wish.longest_request} tokens; "
        f"{would}"
    )


def lengths(settings: Settings, context: int | None) -> Values:
    """The limits of prompt, response and turn for a context; those that are set if none is given."""
    if context is None:
        return {}
    if context < _SHORTEST:
        raise SettingsError(f"--context {context}: tokens of prompt and response together; valid: {_SHORTEST} and more")
    prompt = min(settings.rollout.max_prompt_tokens, context // 2)
    return {
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": context - prompt,
        "rollout.max_turn_tokens": min(settings.rollout.max_turn_tokens, context - prompt),
    }


def plan_command(settings: Settings, request: PlanRequest, *, critic: bool) -> list[str]:
    """The lines that ``agentrl plan`` prints, comments and then the overlay; writes the overlay if asked to."""
    if settings.model.path is None:
        raise SettingsError(
            "there is nothing to plan: give --model DIRECTORY, FILE.json or OWNER/NAME, or --config FILE"
        )
    machine = machine_of(request, settings)
    own = lengths(settings, request.context)
    changes = {key.rpartition(".")[2]: value for key, value in own.items()}
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update=changes)})
    given: Values = {"model.path": settings.model.path} | own
    shape = read_shape(settings.model)
    wish = wish_of(settings, critic=critic, only_adapt=request.lora)
    if wish.only_adapt and not may_adapt():
        raise SettingsError(
            f"adapters need the package peft: {install_extra('lora')}; or leave out --lora, and set model.lora.rank=0"
        )
    obstacle = length_obstacle(shape.config, wish.longest_request)
    if obstacle is not None:
        raise SettingsError(obstacle)
    plan = plan_for(shape, machine, wish)
    title = f"{shape.name} on {machine}, {wish.context} tokens: written by agentrl plan"
    text = overlay_text(given | plan_values(plan), base=request.base, title=title)
    lines = [f"# {line}" for line in plan_lines(shape, machine, plan)]
    if request.write is None:
        return [*lines, *text.splitlines()]
    try:
        request.write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"--write {request.write}: {error.strerror}; valid: a file in a folder that exists"
        ) from error
    return [*lines, f"# written to {request.write}: agentrl train --config {request.write}"]
