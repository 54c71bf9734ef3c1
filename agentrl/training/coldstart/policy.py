"""The policy that a run starts from: the given model, or the cached result of a cold start."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.errors import SettingsError
from agentrl.rollout.engines.table import engine_facts
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import usable_cores
from agentrl.training.coldstart.limits import measured_problems
from agentrl.training.coldstart.train import cached_policy, cold_start, read_cold_demonstrations
from agentrl.training.engine.determinism import set_determinism
from agentrl.training.settings import ColdstartSettings
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.config import Settings


_LINES = 20  # of progress where there is no live display


def starting_policy(settings: Settings, console: Console, *, say_found: bool = True) -> str:
    """Directory or id of the policy to start from; runs and caches a cold start if the settings ask for one."""
    if settings.coldstart.demonstrations is None and settings.model.path is not None:
        return settings.model.path
    loaded = read_cold_demonstrations(settings)
    path = cached_policy(settings, loaded.demonstrations)
    if path.exists():
        if say_found:
            console.note(f"policy: {path} (cold start of an earlier run)")
        return str(path)
    console.note(f"cold start: {settings.coldstart.steps} steps on {loaded.description}")
    if settings.coldstart.direct_share:
        console.note(_direct_answers(settings.coldstart))
    make_policy(settings, path, console, measured_problems(settings))
    return str(path)


def make_policy(settings: Settings, output: Path, console: Console, problems: Sequence[Problem] = ()) -> None:
    """Run the cold start and export its policy, which is to play ``problems``, to ``output``."""
    began = time.monotonic()
    losses: list[float] = []
    with console.progress(settings.coldstart.steps, unit="cold-start step", lines=_LINES) as progress:

        def report(step: int, loss: float) -> None:
            losses.append(loss)
            progress.update(step, {"policy/loss": loss})

        asyncio.run(cold_start(settings, output, report, problems))
    perplexity = math.exp(min(sum(losses[-10:]) / len(losses[-10:]), 50.0))
    console.note(f"policy: {output}, made in {time.monotonic() - began:.0f} s, last perplexity {perplexity:.3f}")


def _direct_answers(cold: ColdstartSettings) -> str:
    last = "all steps" if cold.direct_steps is None else f"the last {cold.direct_steps} steps"
    how = "show only their answer" if cold.direct_turn == "first" else "answer too early, in any turn"
    return f"cold start: in {last}, {cold.direct_share:.0%} of the demonstrations {how} (direct_share)"


def coldstart_command(settings: Settings, output: Path) -> None:
    """``agentrl coldstart``: make a policy from demonstrations and write it to ``output``, which must be free.

    Raises SettingsError before any work if it is not free or cannot be written.
    """
    _claim(output)
    set_determinism(settings.training)
    set_threads(settings, processes=1)
    make_policy(settings, output, Console(settings.telemetry))


def _claim(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingsError(f"--output {output}: it exists already; give a new or an empty directory")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output {output}: cannot be made: {error.strerror}") from error


def computing_processes(settings: Settings, *, ranks: int) -> int:
    """How many processes of a run compute on this machine's cores at the same time."""
    beside = settings.rollout.schedule != "synchronous" and engine_facts(settings.rollout).in_process
    return ranks + beside


def set_threads(settings: Settings, *, processes: int) -> None:
    """Set this process's CPU threads: ``training.threads``, or the cores divided by ``processes``."""
    torch.set_num_threads(settings.training.threads or max(1, usable_cores() // processes))
