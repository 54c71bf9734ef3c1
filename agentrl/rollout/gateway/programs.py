"""Agent programs: a function of the user's, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from agentrl.rollout.gateway.settings import AGENT_PREFIX
from agentrl.rollout.gateway.wire import Access
from agentrl_envs.adapters.blocking import BlockingCalls
from agentrl_envs.gym.loop_thread import LoopThread
from agentrl_envs.registry import PluginError, import_attribute
from agentrl_envs.types import Problem

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_TAIL = 2000  # characters of a command's output that a message shows


class AgentFailureError(Exception):
    """The agent crashed or gave no reward: its rollout is no data."""


class AgentProgram(Protocol):
    """Plays one problem through the gateway."""

    async def run(self, problem: Problem, access: Access) -> float | None:
        """The reward; None if the program leaves it to others. Raises AgentFailureError. May be cancelled."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


def load_agent(env: str, *, threads: int = 1) -> AgentProgram:
    """The program of ``agent:module:function`` or ``agent:COMMAND``. Raises PluginError if there is none."""
    named = env.removeprefix(AGENT_PREFIX).strip()
    if _FUNCTION.fullmatch(named):
        found = import_attribute(named, "agent")
        if not callable(found):
            raise PluginError(f"agent {named!r} is a {type(found).__name__}, expected a function")
        _check_signature(named, found)
        return _AsyncAgent(named, found) if inspect.iscoroutinefunction(found) else _Agent(named, found, threads)
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise PluginError(f"agent {named!r} is no command: {error}") from error
    if not words:
        raise PluginError(f"env={env!r}: write agent:module:function or 'agent:COMMAND'")
    return _Command(words)


def _check_signature(name: str, function: Callable[..., object]) -> None:
    try:
        inspect.signature(function).bind("problem", base_url="", api_key="", model="")
    except TypeError as error:
        raise PluginError(
            f"agent {name!r}: it is called as run(problem, *, base_url, api_key, model): {error}"
        ) from None


def as_reward(value: object, said_by: str) -> float | None:
    """A reward, or None. Raises AgentFailureError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise AgentFailureError(f"{said_by} returned {value!r}, expected a finite number as the reward")


def _arguments(access: Access) -> dict[str, str]:
    return {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}


class _AsyncAgent:
    """Coroutines of the user's, in an event loop of their own: one that blocks stops other agents, not the server."""

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self._name = name
        self._function = function
        self._loop: LoopThread | None = None

    async def run(self, problem: Problem, access: Access) -> float | None:
        if self._loop is None:
            self._loop = LoopThread()
        return as_reward(await asyncio.wrap_future(self._loop.start(self._call(problem, access))), self._name)

    async def _call(self, problem: Problem, access: Access) -> object:
        made = self._function(problem, **_arguments(access))
        return await made if inspect.isawaitable(made) else made

    def describe(self) -> str:
        return f"agent: {self._name}, in an event loop"

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


class _Agent:
    """A blocking function of the user's, in threads."""

    def __init__(self, name: str, function: Callable[..., object], threads: int) -> None:
        self._name = name
        self._function = function
        self._calls = BlockingCalls(threads, name="agent")

    async def run(self, problem: Problem, access: Access) -> float | None:
        made = await self._calls.run(lambda: self._function(problem, **_arguments(access)))
        return as_reward(made, self._name)

    def describe(self) -> str:
        return f"agent: {self._name}, in threads"

    def close(self) -> None:
        """Nothing to release: threads end with their calls."""


class _Command:
    """A command for each rollout, told by environment variables where the policy is. Its last line is the reward."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    async def run(self, problem: Problem, access: Access) -> float | None:
        variables = {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_MODEL": access.model,
            "AGENTRL_REWARD_URL": access.base_url.removesuffix("/v1") + "/reward",
            "AGENTRL_PROBLEM": json.dumps(asdict(problem)),
        }
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailureError(f"{self._words[0]}: {error.strerror}") from error
        try:
            out, err = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        if process.returncode:
            said = err.decode(errors="replace")[-_TAIL:].strip()
            raise AgentFailureError(f"{self._words[0]} ended with exit code {process.returncode}: {said}")
        return _last_number(out.decode(errors="replace"))

    def describe(self) -> str:
        return f"agent: {shlex.join(self._words)}, a process for each rollout"

    def close(self) -> None:
        """Nothing to release: processes end with their rollouts."""


def _last_number(text: str) -> float | None:
    lines = text.strip().splitlines()
    try:
        value = float(lines[-1]) if lines else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
