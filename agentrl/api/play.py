"""``agentrl.play``: run an environment on predefined turns without a model, for tests and exploration."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentrl.api.inputs import check_keywords, to_overrides, without_command_line_origin
from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.problems.rows import problem_from_row
from agentrl_envs.episode import Environment
from agentrl_envs.types import Ended, Problem, Step


@dataclass(frozen=True, kw_only=True)
class Playthrough:
    """A conversation played with predefined turns. ``print`` displays the conversation."""

    prompt: str
    turns: tuple[str, ...]
    steps: tuple[Step, ...]
    """The environment's response to each turn."""

    @property
    def reward(self) -> float:
        """The sum of the steps' rewards."""
        return sum(step.reward for step in self.steps)

    @property
    def ended(self) -> Ended | None:
        """How the conversation ended, or None if it has not ended."""
        return self.steps[-1].ended if self.steps else None

    def __str__(self) -> str:
        parts = [("prompt", self.prompt)]
        for turn, step in zip(self.turns, self.steps, strict=True):
            parts += [("model", turn), ("observation", step.observation)]
        lines = [f"--- {origin}\n{text.strip()}" for origin, text in parts if text]
        return "\n".join([*lines, f"=== {self.ended or 'not ended'}, reward {self.reward:g}"])


def play(
    env: str | type,
    row: Mapping[str, object],
    turns: Iterable[str] | None = None,
    *,
    config: str | Path | None = None,
    **settings: object,
) -> Playthrough:
    """Play predefined turns in an environment and return the conversation. No model is loaded.

    Args:
        env: name of an environment, or a class defined in a module.
        row: a row of data, such as a demonstration.
        turns: the model's text of each turn. Default: the row's ``turns``.
        config: a YAML file, or the name of a shipped configuration.
        settings: any setting, as in :func:`agentrl.train`.

    Raises SettingsError for invalid settings, for an agent program, which generates its own turns, and for turns after
    the end of the conversation. Raises ProblemLoadError for a row without a problem. Errors of the environment
    propagate.
    """
    name = env if isinstance(env, str) else f"{env.__module__}:{env.__qualname__}"
    check_keywords(play, settings)
    with without_command_line_origin():
        resolved = load_settings(name, config, to_overrides(settings))
    columns = {key: value for key, value in row.items() if key != "turns"}
    problem = problem_from_row(columns, "the row", source="play", fields={}, answered=False)
    written = tuple(_turns_of_row(row) if turns is None else turns)

    from agentrl.rollout.environment import build_environment
    from agentrl.rollout.gateway.settings import is_agent_program

    if is_agent_program(name):
        raise SettingsError(
            f"env={name} is an agent program, which generates its own turns: agentrl.play does not support it"
        )
    with ThreadPoolExecutor(1) as thread:  # a notebook's thread already runs a loop
        return thread.submit(asyncio.run, _play_turns(build_environment(resolved), problem, written)).result()


def _turns_of_row(row: Mapping[str, object]) -> list[str]:
    turns = row.get("turns", ())
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, Mapping) and "model" in turn for turn in turns):
        raise SettingsError("the row's turns must be a list of objects, each with a string 'model'")
    return [cast(str, turn["model"]) for turn in turns]


async def _play_turns(environment: Environment, problem: Problem, turns: tuple[str, ...]) -> Playthrough:
    await environment.open()
    try:
        episode = environment.episode(problem)
        try:
            prompt, steps = str(await episode.start()), list[Step]()
            for number, turn in enumerate(turns, start=1):
                ended = steps[-1].ended if steps else None
                if ended is not None:
                    raise SettingsError(f"the conversation ended ({ended}) before turn {number}: {turn!r:.200}")
                steps.append(await episode.step(turn))
            return Playthrough(prompt=prompt, turns=turns, steps=tuple(steps))
        finally:
            await episode.close()
    finally:
        await environment.close()
