"""Environments behind OpenEnv servers: ``--env openenv:http://HOST:PORT``, with the extra ``openenv``.

The text of a turn becomes a text field of the server's action, and a text field of its observation is what the model
reads next. Which fields these are is found in the server's schemas or said by settings. A problem is a seed of the
environment (``builtin:seeds``); the columns of a row go to the server's ``reset`` by their names.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from agentrl_envs.adapters.adapted import AdaptedFactory
from agentrl_envs.adapters.openenv_wire import Observed, OpenEnvServer, OpenEnvSession, Refused
from agentrl_envs.episode import Environment, EnvironmentContractError, EpisodeUsageError, UnavailableError
from agentrl_envs.read_only import thawed
from agentrl_envs.registry import EnvironmentFactory, PluginError, install_extra
from agentrl_envs.settings import OpenEnvSettings
from agentrl_envs.types import MALFORMED, Ended, Problem, Step, ToolCall, as_reward

TEXT = "{text}"
_OF_EVERY_OBSERVATION = frozenset({"done", "reward", "metadata"})

logger = logging.getLogger(__name__)


def openenv_environment(url: str) -> EnvironmentFactory:
    """The factory of environments on the server at ``url``. Raises PluginError without the package websockets."""
    if importlib.util.find_spec("websockets") is None:
        raise PluginError(f"environment openenv:{url} needs websockets: {install_extra('openenv')}")
    OpenEnvServer(url, deadline=1.0)  # checks the address
    return AdaptedFactory(OpenEnvSettings, functools.partial(OpenEnvEnvironment, url))


@dataclass(frozen=True, kw_only=True)
class TextFields:
    """Where the texts stand: in an action, in the first observation and in the others."""

    action: Mapping[str, object]
    first: str
    later: str

    def acted(self, text: str) -> dict[str, object]:
        """The action of a turn.

        >>> TextFields(action={"code": "{text}", "lines": ["# {text}"]}, first="out", later="out").acted("x")
        {'code': 'x', 'lines': ['# x']}
        """
        return cast("dict[str, object]", _filled(dict(self.action), text))


class OpenEnvEnvironment(Environment):
    """The episodes of one server."""

    def __init__(self, url: str, settings: OpenEnvSettings) -> None:
        self.settings = settings
        self.server = OpenEnvServer(url, deadline=settings.call_deadline)
        self._fields: TextFields | None = None

    @property
    def fields(self) -> TextFields:
        """The text fields, once the environment is open."""
        if self._fields is None:
            raise EpisodeUsageError("the environment is not open: await its open() first")
        return self._fields

    async def open(self) -> None:
        """Ask the server for its schemas. Raises UnavailableError, and PluginError where a field must be named."""
        if self._fields is None:
            self._fields = find_fields(await self.server.schemas(), self.settings, self.server.url)

    def episode(self, problem: Problem) -> OpenEnvEpisode:
        """A fresh episode; its session begins when it starts."""
        return OpenEnvEpisode(problem, self)

    async def close(self) -> None:
        """Nothing to release: sessions end with their episodes."""

    def describe(self) -> list[str]:
        """The server and the fields of its texts."""
        shown = (
            "" if self._fields is None else f", action {json.dumps(self._fields.action)}, reads {self._fields.later}"
        )
        return [f"OpenEnv server {self.server.url}: up to {self.settings.max_turns} turns{shown}"]


class OpenEnvEpisode:
    """One problem, played in a separate session."""

    def __init__(self, problem: Problem, environment: OpenEnvEnvironment) -> None:
        self.problem = problem
        self._environment = environment
        self._session: OpenEnvSession | None = None
        self._actions: list[str] = []
        self._ended = False

    @property
    def stop(self) -> tuple[str, ...]:
        """``environment.stop``."""
        return self._environment.settings.stop

    def turn_complete(self, text: str) -> bool:
        """True: a stop string always ends the turn."""
        return True

    async def start(self) -> str:
        """Begin a session, which may wait for a free one. Raises UnavailableError and EnvironmentContractError."""
        if self._session is not None:
            raise EpisodeUsageError("the episode was started before")
        environment = self._environment
        seed = zlib.crc32(self.problem.id.encode()) & 0x7FFFFFFF
        columns = cast("dict[str, object]", thawed(self.problem.info))
        self._session, reply = await environment.server.begin({"seed": seed, **columns})
        if isinstance(reply, Refused):
            raise EnvironmentContractError(
                f"reset of OpenEnv server {environment.server.url} failed for problem {self.problem.id}: "
                f"{reply.code}: {reply.message}"
            )
        shown = _shown(reply, environment.fields.first, environment.server.url)
        return "".join(f"{part}\n" for part in (environment.settings.instruction, shown) if part)

    async def step(self, action: str) -> Step:
        """One step of the server. An action that it refuses is answered by its error; the episode goes on."""
        if self._session is None or self._ended:
            raise EpisodeUsageError("the episode is not running: call start() first, and no step() after its end")
        self._actions.append(action)
        try:
            reply = await self._session.ask("step", self._environment.fields.acted(action))
        except UnavailableError as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            self._ended = True
            return Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE)
        step = self._step(reply)
        self._ended = step.ended is not None
        return step

    async def fork(self) -> OpenEnvEpisode:
        """Replay the same actions in a new session, which is exact for deterministic environments."""
        twin = OpenEnvEpisode(self.problem, self._environment)
        if self._session is not None:
            await twin.start()
        for action in self._actions:
            await twin.step(action)
        return twin

    async def close(self) -> None:
        """End the session. May be called more than once."""
        self._ended = True
        session, self._session = self._session, None
        if session is not None:
            await self._environment.server.end(session)

    def _step(self, reply: Observed | Refused) -> Step:
        last = Ended.TURN_LIMIT if len(self._actions) >= self._environment.settings.max_turns else None
        if isinstance(reply, Refused):
            calls = (ToolCall(outcome=MALFORMED, seconds=0.0),)
            return Step(observation=f"\nError: {reply.message}\n", reward=0.0, ended=last, tool_calls=calls)
        url = self._environment.server.url
        try:
            reward = as_reward(reply.reward)
        except ValueError as error:
            raise EnvironmentContractError(f"OpenEnv server {url} returned the reward {error}") from None
        shown = _shown(reply, self._environment.fields.later, url)
        ended = Ended.ANSWERED if reply.done else last
        return Step(observation=f"\n{shown}\n" if shown else "", reward=reward, ended=ended)


def find_fields(schemas: Mapping[str, object], settings: OpenEnvSettings, url: str) -> TextFields:
    """The text fields by the settings, or by the schemas where there is one. Raises PluginError where there is not."""
    action = settings.action
    if action is None:
        name = _only_text(schemas.get("action"), "its action", "environment.action='{NAME: \"{text}\"}'", url)
        action = {name: TEXT}
    elif TEXT not in json.dumps(action):
        raise PluginError(f"environment.action={action!r}: the text {TEXT} must stand where the turn's text belongs")
    hint = "environment.observation=NAME"
    later = settings.observation or _only_text(schemas.get("observation"), "its observation", hint, url)
    first = settings.reset_observation or settings.observation
    if first is None:
        at_reset = schemas.get("reset_observation") or schemas.get("observation")
        first = _only_text(at_reset, "its first observation", "environment.reset_observation=NAME", url)
    return TextFields(action=action, first=first, later=later)


def _only_text(schema: object, what: str, setting: str, url: str) -> str:
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    texts = [name for name, one in properties.items() if name not in _OF_EVERY_OBSERVATION and _is_text(one)]
    if len(texts) == 1:
        return str(texts[0])
    found = (
        f"has the text fields {', '.join(texts)}" if texts else f"has no text field (fields: {', '.join(properties)})"
    )
    raise PluginError(f"OpenEnv server {url}: {what} {found}; name one with {setting}")


def _is_text(schema: object) -> bool:
    """Whether a field takes any text, or null beside it."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return False
    kinds = schema.get("anyOf")
    if isinstance(kinds, list):
        return any(map(_is_text, kinds)) and all(_is_text(one) or one == {"type": "null"} for one in kinds)
    return schema.get("type") == "string"


def _filled(value: object, text: str) -> object:
    if isinstance(value, str):
        return value.replace(TEXT, text)
    if isinstance(value, dict):
        return {name: _filled(one, text) for name, one in value.items()}
    return [_filled(one, text) for one in value] if isinstance(value, list) else value


def _shown(reply: Observed, field: str, url: str) -> str:
    """The text of an observation's field; another value is written as JSON."""
    value: object = reply.observation
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(reply.observation)
            raise EnvironmentContractError(
                f"OpenEnv server {url}: the observation has no field {field!r} (fields: {known})"
            )
        value = value[name]
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
