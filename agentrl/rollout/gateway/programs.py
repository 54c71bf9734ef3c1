"""Agent programs: a function of the user's, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import cast

from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AGENT
from agentrl.rollout.gateway.wire import Access
from agentrl_envs.adapters.blocking import BlockingCalls
from agentrl_envs.gym.loop_thread import LoopThread
from agentrl_envs.registry import PluginError, import_attribute
from agentrl_envs.types import Problem, as_reward

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_TAIL = 2000  # characters of a command's output that a message shows


class AgentFailureError(Exception):
    """The agent crashed or gave no reward: its rollout is no data."""


class AgentProgram(ABC):
    """Plays problems through the gateway; without more it has nothing to prepare, to wait for or to release."""

    async def open(self, server: AgentGateway) -> None:  # noqa: B027 - most have nothing to do
        """Get to know the server."""

    async def ready(self, access: Access) -> None:  # noqa: B027 - most have nothing to do
        """Return when the program begins with a rollout, whose deadline counts from then."""

    @abstractmethod
    async def run(self, problem: Problem, access: Access) -> float | None:
        """The reward; None if the program leaves it to others. Raises AgentFailureError. May be cancelled."""

    @abstractmethod
    def describe(self) -> str:
        """A line for the console."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to do
        """End what does not end with its rollout."""


def load_agent(named: str, *, threads: int = 1) -> AgentProgram:
    """The program of ``module:function`` or ``COMMAND``. Raises PluginError if there is none."""
    if _FUNCTION.fullmatch(named):
        found = import_attribute(named, "agent")
        if not callable(found):
            raise PluginError(f"agent {named!r} is a {type(found).__name__}, expected a function")
        _check_signature(named, found)
        return _FunctionAgent(named, found, threads)
    words = split_command(named)
    if not words:
        raise PluginError(f"env={AGENT}: write agent:module:function or 'agent:COMMAND'")
    return _Command(words)


def split_command(named: str) -> list[str]:
    """The words of a command. Raises PluginError for a quotation that is not closed."""
    try:
        return shlex.split(named)
    except ValueError as error:
        raise PluginError(f"agent {named!r} is no command: {error}") from error


async def start_process(
    words: Sequence[str], variables: Mapping[str, str], *, stdout: int, stderr: int | None = None
) -> asyncio.subprocess.Process:
    """A process in a session of its own, told where the policy is. Raises AgentFailureError if it cannot be started."""
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            env={**os.environ, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentFailureError(f"{words[0]}: {error.strerror}") from error


def kill(process: asyncio.subprocess.Process) -> None:
    """End a process with what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _check_signature(name: str, function: Callable[..., object]) -> None:
    try:
        inspect.signature(function).bind("problem", base_url="", api_key="", model="")
    except TypeError as error:
        raise PluginError(
            f"agent {name!r}: it is called as run(problem, *, base_url, api_key, model): {error}"
        ) from None


def _optional_reward(value: object, source: str) -> float | None:
    """Return a reward, or None if the program returned none. Raises AgentFailureError for anything else."""
    try:
        return None if value is None else as_reward(value)
    except ValueError as error:
        raise AgentFailureError(f"{source} returned the reward {error}") from None


class _FunctionAgent(AgentProgram):
    """A function of the user's: coroutines in an event loop of their own, beside the server's, others in threads."""

    def __init__(self, name: str, function: Callable[..., object], threads: int) -> None:
        self._name = name
        self._function = function
        self._async = inspect.iscoroutinefunction(function)
        self._threads = BlockingCalls(threads, name="agent")
        self._loop: LoopThread | None = None

    async def run(self, problem: Problem, access: Access) -> float | None:
        given = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        call = partial(self._function, problem, **given)
        if not self._async:
            return _optional_reward(await self._threads.run(call), self._name)
        self._loop = self._loop or LoopThread()
        made = self._loop.start(cast("Coroutine[object, object, object]", call()))
        return _optional_reward(await asyncio.wrap_future(made), self._name)

    def describe(self) -> str:
        return f"agent: {self._name}, in {'an event loop' if self._async else 'threads'}"

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


class _Command(AgentProgram):
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
        process = await start_process(self._words, variables, stdout=pipe, stderr=pipe)
        try:
            out, err = await process.communicate()
        finally:
            kill(process)
        if process.returncode:
            said = err.decode(errors="replace")[-_TAIL:].strip()
            raise AgentFailureError(f"{self._words[0]} ended with exit code {process.returncode}: {said}")
        return _optional_reward(_last_number(out.decode(errors="replace")), self._words[0])

    def describe(self) -> str:
        return f"agent: {shlex.join(self._words)}, a process for each rollout"


def _last_number(text: str) -> float | None:
    lines = text.strip().splitlines()
    try:
        return float(lines[-1]) if lines else None
    except ValueError:
        return None
