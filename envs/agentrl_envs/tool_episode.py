"""The common part of episodes whose turns call tools or run programs under a text protocol."""

from __future__ import annotations

import asyncio
import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from agentrl_envs.episode import EpisodeUsageError, UnavailableError
from agentrl_envs.execution import EpisodeSandbox, infrastructure_failure_call
from agentrl_envs.forks import closed_on_failure
from agentrl_envs.protocols.base import MalformedCall, TextProtocol, ToolRequest
from agentrl_envs.protocols.texts import truncate_output
from agentrl_envs.settings import ClassEnvironmentSettings, SimpleTIRSettings
from agentrl_envs.tools import EpisodeTools
from agentrl_envs.types import MALFORMED, Ended, Problem, Step, ToolCall
from agentrl_sandbox.client import Sandbox

logger = logging.getLogger(__name__)


class ToolEpisode(ABC):
    """One problem under one protocol. Closes its tools and its interpreter session, but not the shared sandbox.

    Subclasses define `begin`, which creates the tools and returns the prompt, and `play_turn`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        settings: SimpleTIRSettings | ClassEnvironmentSettings,
        protocol: TextProtocol,
        sandbox: Sandbox | None,
    ) -> None:
        self.problem = problem
        self._settings = settings
        self._protocol = protocol
        self._shared_sandbox = sandbox
        self._sandbox: EpisodeSandbox | None = None
        self._tools: EpisodeTools | None = None
        self._turns = 0
        self._state = "new"  # new -> running -> ended; any state -> closed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the engine stops generating."""
        return self._protocol.stop_strings

    def turn_complete(self, text: str) -> bool:
        """Return True if a turn that ended at a stop string is complete."""
        return self._protocol.turn_complete(text)

    async def start(self) -> str:
        """Create the tools and return the prompt. Raises ToolError if a tool cannot be created."""
        self._require_state("new")
        self._state = "running"
        if self._shared_sandbox is not None:
            self._sandbox = EpisodeSandbox(self._shared_sandbox, self._settings)
        return await self.begin()

    async def step(self, action: str) -> Step:
        """Play one turn. If a service does not respond, the rollout ends as an infrastructure failure."""
        self._require_state("running")
        self._turns += 1
        try:
            step = await self.play_turn(action)
        except UnavailableError as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            call = infrastructure_failure_call(error.seconds)
            step = Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE, tool_calls=(call,))
        if step.ended is not None:
            self._state = "ended"
        return step

    async def fork(self) -> Self:
        """Return an episode with the same conversation so far. Copies the interpreter session and the tools."""
        twin = copy.copy(self)
        twin._sandbox = twin._tools = None
        async with closed_on_failure(twin):
            if self._sandbox is not None:
                twin._sandbox = await self._sandbox.fork()
            if self._tools is not None:
                twin._tools = await self._tools.fork(twin._sandbox)
        return twin

    async def close(self) -> None:
        """Close the tools and the interpreter session. Further turns raise EpisodeUsageError."""
        self._state = "closed"
        if self._tools is not None:
            await self._tools.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    @abstractmethod
    async def begin(self) -> str:
        """Create the tools and return the prompt."""

    @abstractmethod
    async def play_turn(self, action: str) -> Step:
        """Play one turn. Raises UnavailableError if a service does not respond."""

    async def call_tools(
        self, requests: Sequence[ToolRequest | MalformedCall], action: str
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Execute a turn's calls concurrently. Returns the observation and the telemetry of the calls."""
        results = await asyncio.gather(*(self.call_tool(request) for request in requests), return_exceptions=True)
        # Wait for all calls before raising. A tool's bug ends the run, so it takes precedence over a lost service.
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((one for one in failures if not isinstance(one, UnavailableError)), failures[0])
        answered = [result for result in results if not isinstance(result, BaseException)]
        observation = self._protocol.observation(action, [text for text, _ in answered])
        return observation, tuple(call for _, call in answered)

    async def call_tool(self, request: ToolRequest | MalformedCall) -> tuple[str, ToolCall]:
        """Return the result that the model reads and the call's telemetry. An invalid call results in its message."""
        if isinstance(request, MalformedCall):
            return request.message, ToolCall(outcome=MALFORMED, seconds=0.0)
        assert self._tools is not None
        result, call = await self._tools.call(request.name, request.arguments)
        return truncate_output(result, self._settings.observation_limit), call

    def _require_state(self, state: str) -> None:
        if self._state != state:
            raise EpisodeUsageError(f"episode of problem {self.problem.id!r} is {self._state}, expected {state}")
