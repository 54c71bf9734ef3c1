"""Demonstrations that leave their observations to the environment: it writes them when it plays the turns."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentrl.errors import SettingsError
from agentrl.problems.demonstrations.demonstration import Demonstration, ShownTurn
from agentrl.rollout.environment import class_factory
from agentrl_envs.chat.chat_format import plain_format
from agentrl_envs.episode import Environment
from agentrl_envs.registry import did_you_mean

if TYPE_CHECKING:
    from agentrl.config import Settings


async def with_observations(demonstration: Demonstration, environment: Environment) -> Demonstration:
    """The demonstration as ``environment`` answers it; unchanged if its author wrote the observations.

    Raises SettingsError for one that ends before its last turn.
    """
    if not demonstration.is_played:
        return demonstration
    *before, last = demonstration.turns
    played: list[ShownTurn] = []
    episode = environment.episode(demonstration.problem)
    try:
        await episode.start()
        for number, turn in enumerate(before, start=1):
            step = await episode.step(turn.model)
            if step.ended is not None:
                raise SettingsError(
                    f"coldstart.demonstrations: turn {number} of {len(demonstration.turns)} of the demonstration "
                    f"{demonstration.problem.id!r} ends its episode ({step.ended}): {turn.model!r:.200}"
                )
            played.append(ShownTurn(model=turn.model, observation=step.observation))
    finally:
        await episode.close()
    return replace(demonstration, turns=(*played, last))


def check_template(settings: Settings, template: object) -> None:
    """Raise SettingsError where a class's calls are in the model's chat template: demonstrations are plain text."""
    if template and class_factory(settings.env) is not None:
        raise SettingsError(
            f"coldstart.demonstrations={settings.coldstart.demonstrations} are plain text, but env={settings.env} "
            f"speaks the chat template of model.path={settings.model.path}: set coldstart.demonstrations=null"
        )


def check_calls(demonstrations: Sequence[Demonstration], settings: Settings) -> None:
    """Raise SettingsError where a demonstration calls a tool that the user's class does not have."""
    factory = class_factory(settings.env)
    if factory is None:
        return
    known = [schema.name for schema in factory.tools.schemas]
    find = plain_format([]).calls.find
    for item in demonstrations:
        for number, turn in enumerate(item.turns, start=1):
            unknown = [call.name for call in find(turn.model) if not call.error and call.name not in known]
            if unknown:
                hint = did_you_mean(unknown[0], known) or f"; its tools: {', '.join(known) or 'none'}"
                raise SettingsError(
                    f"{item.place or item.problem.id}: turn {number} calls {unknown[0]!r}, which is no tool of "
                    f"env={settings.env}{hint}"
                )


def environment_key(settings: Settings) -> dict[str, str]:
    """What tells two versions of a user's class apart: it writes the prompts and the observations of a cold start."""
    factory = class_factory(settings.env)
    if factory is None:
        return {}
    try:
        source = Path(inspect.getfile(cast(type, factory.found))).read_bytes()
    except (OSError, TypeError):  # a class without a file
        source = b""
    return {"env": settings.env, "source": hashlib.sha256(source).hexdigest()}
