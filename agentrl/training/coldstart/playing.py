"""Demonstrations that leave their observations to the environment: it writes them when it plays the turns."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentrl.errors import SettingsError
from agentrl.problems.demonstrations.demonstration import Demonstration, ShownTurn
from agentrl.rollout.environment import class_factory
from agentrl_envs.chat.calls import FoundCall
from agentrl_envs.chat.chat_format import plain_format
from agentrl_envs.episode import Environment, EnvironmentContractError
from agentrl_envs.registry import did_you_mean

if TYPE_CHECKING:
    from agentrl.config import Settings

logger = logging.getLogger(__name__)


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
    """Raise SettingsError where a demonstration lacks a column of a class's ``reset``, or calls a tool that it has not.

    Calls with wrong arguments may be shown on purpose: they are a warning.
    """
    factory = class_factory(settings.env)
    if factory is None:
        return
    schemas = {schema.name: schema for schema in factory.tools.schemas}
    wrong = []
    for item in demonstrations:
        place = item.location or item.problem.id
        try:
            factory.columns(item.problem)
        except EnvironmentContractError as error:
            raise SettingsError(f"{place}: {error}") from error
        for number, call in _calls(item):
            schema = schemas.get(call.name)
            if schema is None:
                hint = did_you_mean(call.name, schemas) or f"; its tools: {', '.join(schemas) or 'none'}"
                raise SettingsError(
                    f"{place}: turn {number} calls {call.name!r}, which is no tool of env={settings.env}{hint}"
                )
            refusal = schema.refusal(call.arguments if isinstance(call.arguments, dict) else {})
            wrong += [f"{place}: turn {number}: {refusal}"] if refusal else []
    if wrong:
        more = f" (and {len(wrong) - 1} more such calls)" if wrong[1:] else ""
        logger.warning("%s%s; the model learns this call, and reads the error", wrong[0], more)


def _calls(item: Demonstration) -> Iterator[tuple[int, FoundCall]]:
    """The calls of a demonstration that can be read, with the numbers of their turns."""
    find = plain_format([]).calls.find
    for number, turn in enumerate(item.turns, start=1):
        yield from ((number, call) for call in find(turn.model) if not call.error)


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
