"""Environments on OpenEnv servers: ``--env openenv:http://HOST:PORT``, with the extra ``openenv``.

The text of a turn is inserted into a text field of the server's action. The observation is a text field of the server's
observation. The server's schemas, or the settings, determine these fields. A problem is a seed of the environment
(``builtin:seeds``). The columns of a row are passed to the server's ``reset`` by name.

Messages are JSON over one WebSocket per session, as in OpenEnv 0.10. The server responds to ``reset`` and ``step`` with
``observation`` or ``error``; ``close`` ends the session. If a server has no free session, its first message reports the
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import logging
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from agentrl_envs.episode import (
    Environment,
    EnvironmentContractError,
    EpisodeUsageError,
    UnavailableError,
)
from agentrl_envs.factory import PlainTextEnvironmentFactory
from agentrl_envs.forks import replay_actions
from agentrl_envs.registry import PluginError, install_command
from agentrl_envs.settings import OpenEnvSettings
from agentrl_envs.types import MALFORMED, Ended, Problem, Step, ToolCall, as_reward, thaw

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


_SERVER_FULL = "CAPACITY_REACHED"
_NO_SESSION_CODES = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})
_MAX_MESSAGE_BYTES = 64 * 2**20
_CLOSE_SECONDS = 5.0  # seconds to wait for a session to close
_SCHEMA_DEADLINE = 30.0
# Seconds between attempts to open a session on a full server. If a session of this run ends, the next attempt is
# immediate.
_MIN_WAIT, _MAX_WAIT = 0.2, 5.0
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The server's response to a reset or a step."""

    observation: Mapping[str, object]
    reward: float
    done: bool


@dataclass(frozen=True, kw_only=True)
class ErrorResponse:
    """An error response of the server. If the server is full, ``sessions`` is its maximum number of sessions."""

    code: str
    message: str
    sessions: int | None = None


class OpenEnvSession:
    """One session. The server responds to messages in order."""

    def __init__(self, socket: ClientConnection, *, url: str, deadline: float) -> None:
        self._socket = socket
        self._url = url
        self._deadline = deadline

    async def request(self, kind: str, data: Mapping[str, object]) -> StepResult | ErrorResponse:
        """Send a message and return the response.

        Raises UnavailableError if the server disconnects, exceeds the deadline, or reports that it cannot serve the
        session.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._deadline):
                with contextlib.suppress(ConnectionClosed):  # a message with the reason may still be readable
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                text = await self._socket.recv()
        except TimeoutError:
            description = f"did not respond to {kind} within {self._deadline:g} s (environment.call_deadline)"
            raise UnavailableError(f"OpenEnv server {self._url} {description}", seconds=self._deadline) from None
        except (ConnectionClosed, OSError) as error:
            raise UnavailableError(f"OpenEnv server {self._url} closed the session: {error}") from error
        reply = _parse_response(text, self._url)
        if isinstance(reply, ErrorResponse) and reply.code in _NO_SESSION_CODES:
            raise UnavailableError(f"OpenEnv server {self._url}: {reply.code}: {reply.message}")
        return reply

    async def close(self) -> None:
        """End the session and wait for the server to close it."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.wait_closed()
        await self._socket.close()


class OpenEnvSessionQueue:
    """A server, and the queue of episodes that wait for a session."""

    def __init__(self, url: str, *, deadline: float) -> None:
        """Create a client without connecting. ``url`` may omit the scheme. Raises PluginError if it is invalid."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._parts = urlsplit(self.url)
        if self._parts.scheme not in ("http", "https", "ws", "wss") or not self._parts.hostname:
            raise PluginError(f"environment openenv:{url} has no valid address; write openenv:http://HOST:PORT")
        self._deadline = deadline
        self._proxied = self._parts.hostname not in _LOCAL_HOSTS
        self._session_limit: int | None = None  # maximum number of sessions; None until the server reports it
        self._open_sessions = 0
        self._forked_sessions = 0  # sessions of forked episodes, which end after their forks
        self._ended = asyncio.Event()

    async def fetch_schemas(self) -> Mapping[str, object]:
        """Return the JSON schemas of actions and observations.

        Raises UnavailableError if the server cannot be reached and PluginError if it is not an OpenEnv server.
        """
        scheme = "https" if self._parts.scheme in ("https", "wss") else "http"
        address = self._parts._replace(scheme=scheme).geturl() + "/schema"
        try:
            text = await asyncio.to_thread(_fetch, address, proxied=self._proxied)
            schemas = json.loads(text)
        except urllib.error.HTTPError as error:
            raise PluginError(f"{self.url} is not an OpenEnv server: {address} returned status {error.code}") from None
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnavailableError(f"OpenEnv server {self.url} cannot be reached: {reason}") from error
        except ValueError as error:
            raise PluginError(f"{self.url} is not an OpenEnv server: {address} is not JSON") from error
        if not isinstance(schemas, dict):
            raise PluginError(f"{self.url} is not an OpenEnv server: {address} is not a JSON object")
        return schemas

    async def open_session(
        self, reset: Mapping[str, object], *, fork: bool = False
    ) -> tuple[OpenEnvSession, StepResult | ErrorResponse]:
        """Wait for a free session.

        Returns the session and the response to ``reset``. The caller must call `close_session`. ``fork``: the session
        is for a fork. Raises UnavailableError if all sessions belong to forked episodes, because the wait would never
        end.
        """
        wait = _MIN_WAIT
        while True:
            while self._session_limit is not None and self._open_sessions >= self._session_limit:
                if fork and self._forked_sessions >= self._open_sessions:
                    raise UnavailableError(
                        f"OpenEnv server {self.url} allows {self._session_limit} concurrent sessions, and forked "
                        "rollouts hold all of them: raise the server's limit, or lower rollout.concurrency or "
                        "rollout.branching.live"
                    )
                self._ended.clear()
                await self._ended.wait()
            self._open_sessions += 1
            session, reply = await self._try_to_open(reset)
            if session is not None:
                return session, reply
            assert isinstance(reply, ErrorResponse)
            self._record_session_limit(reply)
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), wait)
            wait = min(_MAX_WAIT, 1.5 * wait)

    def record_fork(self) -> None:
        """Record that an episode is forked. A forked episode is not played any further."""
        self._forked_sessions += 1

    async def close_session(self, session: OpenEnvSession, *, forked: bool = False) -> None:
        """End a session, so that the next episode in the queue can start. ``forked`` is true after `record_fork`."""
        self._forked_sessions -= forked
        try:
            await session.close()
        finally:
            self._record_session_end()

    async def _try_to_open(
        self, reset: Mapping[str, object]
    ) -> tuple[OpenEnvSession | None, StepResult | ErrorResponse]:
        """Open a session. Releases the reserved slot unless a session is returned."""
        session = None
        try:
            session = OpenEnvSession(await self._connect(), url=self.url, deadline=self._deadline)
            reply = await session.request("reset", reset)
        except BaseException:
            if session is not None:
                await session.close()
            self._record_session_end()
            raise
        if isinstance(reply, ErrorResponse) and reply.code == _SERVER_FULL:
            await self.close_session(session)
            return None, reply
        return session, reply

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        scheme = "wss" if self._parts.scheme in ("https", "wss") else "ws"
        address = self._parts._replace(scheme=scheme).geturl() + "/ws"
        try:
            return await connect(
                address,
                max_size=_MAX_MESSAGE_BYTES,
                open_timeout=self._deadline,
                close_timeout=_CLOSE_SECONDS,
                proxy=True if self._proxied else None,
            )
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"OpenEnv server {self.url} cannot be reached: {error}") from error
        except InvalidHandshake as error:
            raise UnavailableError(f"OpenEnv server {self.url} refused the connection: {error}") from error

    def _record_session_limit(self, reply: ErrorResponse) -> None:
        most = max(1, reply.sessions or self._open_sessions)
        if self._session_limit is None:
            logger.warning("OpenEnv server %s allows %d concurrent sessions; other episodes wait", self.url, most)
        self._session_limit = most

    def _record_session_end(self) -> None:
        self._open_sessions -= 1
        self._ended.set()


def _fetch(address: str, *, proxied: bool) -> bytes:
    opener = urllib.request.build_opener(*([] if proxied else [urllib.request.ProxyHandler({})]))
    with opener.open(address, timeout=_SCHEMA_DEADLINE) as answer:
        content: bytes = answer.read()
    return content


def _parse_response(text: str | bytes, url: str) -> StepResult | ErrorResponse:
    """Parse a server's message. Raises EnvironmentContractError if it is not an OpenEnv message."""
    try:
        message = json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "error":
            most = data.get("max_sessions")
            details = "; ".join(str(one.get("msg")) for one in data.get("errors") or ())
            description = ": ".join(part for part in (str(data["message"]), details) if part)
            return ErrorResponse(
                code=str(data["code"]), message=description, sessions=most if isinstance(most, int) else None
            )
        if kind == "observation":
            return StepResult(
                observation=dict(data["observation"]),
                reward=float(data.get("reward") or 0.0),
                done=bool(data.get("done")),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentContractError(f"OpenEnv server {url} sent an invalid message: {text!r:.200}") from error
    raise EnvironmentContractError(f"OpenEnv server {url} sent a message of type {kind!r} instead of an observation")


TEXT_PLACEHOLDER = "{text}"
_COMMON_OBSERVATION_FIELDS = frozenset({"done", "reward", "metadata"})

logger = logging.getLogger(__name__)


def openenv_environment(url: str) -> PlainTextEnvironmentFactory[OpenEnvSettings]:
    """Return the factory of environments on the server at ``url``.

    Raises PluginError if the package websockets is missing.
    """
    if importlib.util.find_spec("websockets") is None:
        raise PluginError(f"environment openenv:{url} needs the package websockets: {install_command('openenv')}")
    OpenEnvSessionQueue(url, deadline=1.0)  # validates the address
    return PlainTextEnvironmentFactory(OpenEnvSettings, functools.partial(OpenEnvEnvironment, url))


@dataclass(frozen=True, kw_only=True)
class TextFieldNames:
    """The text fields of an action, of the first observation and of later observations."""

    action: Mapping[str, object]
    first_observation: str
    later_observation: str

    def action_for_text(self, text: str) -> dict[str, object]:
        """Return the action for the ``text`` of a turn.

        >>> action = {"code": "{text}", "lines": ["# {text}"]}
        >>> TextFieldNames(action=action, first_observation="out", later_observation="out").action_for_text("x")
        {'code': 'x', 'lines': ['# x']}
        """
        return cast("dict[str, object]", _replace_placeholder(dict(self.action), text))


class OpenEnvEnvironment(Environment):
    """Creates the episodes of one server."""

    def __init__(self, url: str, settings: OpenEnvSettings) -> None:
        self.settings = settings
        self.server = OpenEnvSessionQueue(url, deadline=settings.call_deadline)
        self._fields: TextFieldNames | None = None

    @property
    def text_fields(self) -> TextFieldNames:
        """The text fields. Raises EpisodeUsageError before `open`."""
        if self._fields is None:
            raise EpisodeUsageError("the environment is not open: await environment.open() first")
        return self._fields

    async def open(self) -> None:
        """Request the server's schemas.

        Raises UnavailableError if the server cannot be reached, and PluginError if the settings must select a field.
        """
        if self._fields is None:
            self._fields = choose_text_fields(await self.server.fetch_schemas(), self.settings, self.server.url)

    def episode(self, problem: Problem) -> OpenEnvEpisode:
        """Create an episode. The session begins when the episode starts."""
        return OpenEnvEpisode(problem, self)

    async def close(self) -> None:
        """Do nothing, because sessions end with their episodes."""

    def describe(self) -> list[str]:
        """Return the server's address and its text fields."""
        line = f"OpenEnv server {self.server.url}: up to {self.settings.max_turns} turns"
        if self._fields is not None:
            line += f", action {json.dumps(self._fields.action)}, observation {self._fields.later_observation}"
        return [line]


class OpenEnvEpisode:
    """One problem, played in a separate session."""

    def __init__(self, problem: Problem, environment: OpenEnvEnvironment) -> None:
        self.problem = problem
        self._environment = environment
        self._session: OpenEnvSession | None = None
        self._actions: list[str] = []
        self._ended = False
        self._is_fork = False
        self._is_forked = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings in ``environment.stop``."""
        return self._environment.settings.stop

    def turn_complete(self, text: str) -> bool:
        """Return True, because a stop string always ends the turn."""
        return True

    async def start(self) -> str:
        """Begin a session. Waits for a free session if necessary.

        Raises UnavailableError if the server is unavailable and EnvironmentContractError if the reset fails.
        """
        if self._session is not None:
            raise EpisodeUsageError("the episode has already started: call start() once")
        environment = self._environment
        seed = zlib.crc32(self.problem.id.encode()) & 0x7FFFFFFF
        columns = cast("dict[str, object]", thaw(self.problem.info))
        self._session, reply = await environment.server.open_session({"seed": seed, **columns}, fork=self._is_fork)
        if isinstance(reply, ErrorResponse):
            raise EnvironmentContractError(
                f"reset of OpenEnv server {environment.server.url} failed for problem {self.problem.id}: "
                f"{reply.code}: {reply.message}"
            )
        shown = _field_as_text(reply, environment.text_fields.first_observation, environment.server.url)
        return "".join(f"{part}\n" for part in (environment.settings.instruction, shown) if part)

    async def step(self, action: str) -> Step:
        """Execute one step on the server.

        If the server rejects the action, the error message is the observation, and the episode continues.
        """
        if self._session is None or self._ended:
            raise EpisodeUsageError(
                "the episode is not running: call start() first, and do not call step() after the end"
            )
        self._actions.append(action)
        try:
            reply = await self._session.request("step", self._environment.text_fields.action_for_text(action))
        except UnavailableError as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            self._ended = True
            return Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE)
        step = self._step_of_response(reply)
        self._ended = step.ended is not None
        return step

    async def fork(self) -> OpenEnvEpisode:
        """Repeat all actions in a new session. The copy is exact only if the environment is deterministic."""
        twin = OpenEnvEpisode(self.problem, self._environment)
        twin._is_fork = True
        if self._session is not None:
            if not self._is_forked:
                self._is_forked = True
                self._environment.server.record_fork()
            await replay_actions(twin, self._actions)
        return twin

    async def close(self) -> None:
        """End the session. May be called more than once."""
        self._ended = True
        session, self._session = self._session, None
        if session is not None:
            await self._environment.server.close_session(session, forked=self._is_forked)

    def _step_of_response(self, reply: StepResult | ErrorResponse) -> Step:
        last = Ended.TURN_LIMIT if len(self._actions) >= self._environment.settings.max_turns else None
        if isinstance(reply, ErrorResponse):
            calls = (ToolCall(outcome=MALFORMED, seconds=0.0),)
            return Step(observation=f"\nError: {reply.message}\n", reward=0.0, ended=last, tool_calls=calls)
        url = self._environment.server.url
        try:
            reward = as_reward(reply.reward)
        except ValueError as error:
            raise EnvironmentContractError(f"OpenEnv server {url} returned the invalid reward {error}") from None
        shown = _field_as_text(reply, self._environment.text_fields.later_observation, url)
        ended = Ended.ANSWERED if reply.done else last
        return Step(observation=f"\n{shown}\n" if shown else "", reward=reward, ended=ended)


def choose_text_fields(schemas: Mapping[str, object], settings: OpenEnvSettings, url: str) -> TextFieldNames:
    """Return the text fields from the settings or the schemas.

    Raises PluginError if a schema has no unique text field.
    """
    action = settings.action
    if action is None:
        name = _only_text_field(schemas.get("action"), "its action", "environment.action='{NAME: \"{text}\"}'", url)
        action = {name: TEXT_PLACEHOLDER}
    elif TEXT_PLACEHOLDER not in json.dumps(action):
        raise PluginError(
            f"environment.action={action!r} must contain {TEXT_PLACEHOLDER}, which is replaced by the turn's text"
        )
    hint = "environment.observation=NAME"
    later = settings.observation or _only_text_field(schemas.get("observation"), "its observation", hint, url)
    first = settings.reset_observation or settings.observation
    if first is None:
        at_reset = schemas.get("reset_observation") or schemas.get("observation")
        first = _only_text_field(at_reset, "its first observation", "environment.reset_observation=NAME", url)
    return TextFieldNames(action=action, first_observation=first, later_observation=later)


def _only_text_field(schema: object, what: str, setting: str, url: str) -> str:
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    texts = [
        name for name, one in properties.items() if name not in _COMMON_OBSERVATION_FIELDS and _accepts_any_text(one)
    ]
    if len(texts) == 1:
        return str(texts[0])
    description = (
        f"has the text fields {', '.join(texts)}" if texts else f"has no text field (fields: {', '.join(properties)})"
    )
    raise PluginError(f"OpenEnv server {url}: {what} {description}; select one with {setting}")


def _accepts_any_text(schema: object) -> bool:
    """Return True if a field accepts any text, with or without null."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return False
    kinds = schema.get("anyOf")
    if isinstance(kinds, list):
        return any(map(_accepts_any_text, kinds)) and all(
            _accepts_any_text(one) or one == {"type": "null"} for one in kinds
        )
    return schema.get("type") == "string"


def _replace_placeholder(value: object, text: str) -> object:
    if isinstance(value, str):
        return value.replace(TEXT_PLACEHOLDER, text)
    if isinstance(value, dict):
        return {name: _replace_placeholder(one, text) for name, one in value.items()}
    return [_replace_placeholder(one, text) for one in value] if isinstance(value, list) else value


def _field_as_text(reply: StepResult, field: str, url: str) -> str:
    """Return the text of an observation's field. Serializes other values as JSON."""
    value: object = reply.observation
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(reply.observation)
            raise EnvironmentContractError(
                f"OpenEnv server {url}: the observation has no field {field!r} (fields: {known})"
            )
        value = value[name]
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
