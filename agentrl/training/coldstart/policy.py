"""The policy that a run starts from: the given model, or the cached result of a cold start."""

from __future__ import annotations

import asyncio
import math
import statistics
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
    console.note(describe_loss(losses, within=settings.coldstart.direct_steps))


def describe_loss(losses: Sequence[float], within: int | None = None) -> str:
    """Whether the loss still fell at the end: the last tenth of the steps against the tenth before, by two errors.

    Both lie in the last ``within`` steps, which show other demonstrations than the steps before.

    >>> describe_loss([1.0, 1.2] * 20)
    'cold start: the loss is on a plateau (1.100, before 1.100): more coldstart.steps would hardly lower it'
    >>> describe_loss([1.0 - step / 100 for step in range(40)])
    'cold start: the loss still falls (0.625, before 0.665): more coldstart.steps would lower it'
    """
    count = min(max(4, len(losses) // 10), (within or len(losses)) // 2)
    if count < 2 or len(losses) < 2 * count:
        return "cold start: too few steps to tell whether the loss still falls"
    before, last = losses[-2 * count : -count], losses[-count:]
    error = math.sqrt((statistics.variance(before) + statistics.variance(last)) / count)
    means = f"({statistics.fmean(last):.3f}, before {statistics.fmean(before):.3f})"
    if statistics.fmean(before) - statistics.fmean(last) > 2 * error:
        return f"cold start: the loss still falls {means}: more coldstart.steps would lower it"
    return f"cold start: the loss is on a plateau {means}: more coldstart.steps would hardly lower it"


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
