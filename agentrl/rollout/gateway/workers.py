"""Workers: programs that ask the gateway for rollouts, play any number of them at once and give the rewards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Coroutine
from pathlib import Path

from agentrl.rollout.gateway.programs import (
    AgentFailureError,
    AgentProgram,
    agent_directory,
    kill,
    split_command,
    start_process,
)
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import KEY_VARIABLE, VERIFIERS, AgentGatewaySettings
from agentrl.rollout.gateway.wire import Access
from agentrl_envs.adapters import verifiers_worker
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import VerifiersSettings
from agentrl_envs.types import Problem

EXTERNAL = "external"
_STDERR = 2


class Workers(AgentProgram):
    """One worker process for all rollouts; without a command, workers that others start. They post the rewards."""

    def __init__(
        self,
        words: list[str],
        settings: AgentGatewaySettings,
        *,
        name: str = "",
        variables: dict[str, str] | None = None,
        trusted: bool = False,
    ) -> None:
        self._words = words
        self._settings = settings
        self.trusted = trusted
        self._name = name or shlex.join(words)
        self._variables = variables or {}
        self._server: AgentGateway | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._directory = contextlib.AsyncExitStack()
        self._players: dict[str, asyncio.subprocess.Process | None] = {}

    async def open(self, server: AgentGateway) -> None:
        self._server = server

    async def ready(self, access: Access) -> None:
        """Return when a worker has taken the rollout."""
        process = await self._started() if self._words else None
        await self._unless_it_ends(process, self._serving().taken(access))
        self._players[access.name] = process

    async def run(self, problem: Problem, access: Access) -> float | None:
        await self._unless_it_ends(self._players.pop(access.name), self._serving().finished(access))
        return None

    def describe(self) -> str:
        if self._words:
            return f"agent: {self._name}, one process for all rollouts"
        return f"agents: workers that ask {'' if self._server is None else self._server.url + '/rollouts'} for rollouts"

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill(process)
            await process.wait()
        await self._directory.aclose()

    def _serving(self) -> AgentGateway:
        assert self._server is not None, "the environment is not open"
        return self._server

    async def _unless_it_ends(
        self, process: asyncio.subprocess.Process | None, waiting: Coroutine[object, object, None]
    ) -> None:
        """Wait for ``waiting``. Raises AgentFailureError if the worker's process ends before."""
        done = asyncio.ensure_future(waiting)
        ended = None if process is None else asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait([one for one in (done, ended) if one is not None], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                said = "" if ended is None else f" with exit code {ended.result()}"
                raise AgentFailureError(f"the worker {self._name} ended{said}")
        finally:
            for one in (done, ended):
                if one is not None:
                    one.cancel()

    async def _started(self) -> asyncio.subprocess.Process:
        """The worker's process, a new one if it has ended. What it prints goes to stderr."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                server = self._serving()
                told = {"AGENTRL_GATEWAY_URL": server.url, KEY_VARIABLE: server.key, **self._variables}
                await self._directory.aclose()
                self._process = await start_process(
                    self._words,
                    told,
                    directory=await self._directory.enter_async_context(agent_directory()),
                    inherited=self._settings.agent_environment,
                    stdout=_STDERR,
                )
            return self._process


def load_worker(named: str, settings: AgentGatewaySettings) -> Workers:
    """The worker of ``worker:COMMAND``, or those that others start, of ``worker:external``. Raises PluginError."""
    words = split_command(named)
    if not words:
        raise PluginError("env=worker: write 'worker:COMMAND', or worker:external for workers that you start yourself")
    if named != EXTERNAL:
        return Workers(words, settings)
    if not os.environ.get(KEY_VARIABLE):
        raise PluginError(f"env=worker:external needs {KEY_VARIABLE}, the key with which workers ask for rollouts")
    return Workers([], settings)


def verifiers_worker_of(name: str, options: VerifiersSettings, settings: AgentGatewaySettings) -> Workers:
    """Return the worker that plays a task set of verifiers, in the Python that has verifiers. Raises PluginError."""
    if not name:
        raise PluginError(f"env={VERIFIERS}: write {VERIFIERS}TASKSET")
    if options.python is None:
        raise PluginError(
            f"env={VERIFIERS}{name} needs environment.python, the Python of a virtual environment with verifiers 0.4 "
            "(its dependencies differ from agentrl's): python -m venv venv; venv/bin/pip install 'verifiers==0.4.*'"
        )
    if not Path(options.python).expanduser().is_file():
        raise PluginError(f"environment.python={options.python}: there is no such file")
    words = [str(Path(options.python).expanduser()), str(Path(verifiers_worker.__file__)), name]
    return Workers(
        words,
        settings,
        name=f"verifiers {name}",
        variables={"AGENTRL_VERIFIERS": options.model_dump_json(include={"config", "concurrency"})},
        trusted=True,  # the task set contains answers and rewards, and the worker runs no other code
    )
