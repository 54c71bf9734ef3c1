"""Interfaces between environments and the driver: `Episode`, `Policy` and `Environment`. They exchange text only.

AgentRLEnvError
├── EpisodeUsageError        methods called in the wrong order: a bug of the caller
├── registry.PluginError     a name in the settings cannot be found, imported or used
│   ├── registry.UnknownNameError
│   └── registry.NameTakenError
├── UnavailableError         a service that an episode needs does not respond; the rollout is excluded
├── EnvironmentContractError a custom environment, tool or reward violates its contract
│   ├── tools.ToolError
│   └── rewards.RewardError
└── grading.GraderError      a grading process cannot be started
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from agentrl_envs.types import Ended, Problem, Step

RolloutResult = TypeVar("RolloutResult")


class AgentRLEnvError(Exception):
    """Base class of this package's errors."""


class EpisodeUsageError(AgentRLEnvError, RuntimeError):
    """An episode was stepped before its start, after its end or after it was closed."""


class EnvironmentContractError(AgentRLEnvError, TypeError):
    """A custom environment, tool or reward raised an exception or returned an invalid value."""


class UnavailableError(AgentRLEnvError):
    """A service that an environment, tool or reward needs does not respond. User code may raise this error.

    The rollout ends as an infrastructure failure. It is repeated and never counts as a failure of the policy.
    """

    def __init__(self, message: str, *, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


@runtime_checkable
class Episode(Protocol):
    """One attempt at a problem. It handles text, never token ids.

    The driver samples until a stop string or the end of sequence. If a stop string ended sampling and `turn_complete`
    is False for the text of the turn so far, the driver continues the turn. It then calls `step` with the turn's text.
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the engine stops generating."""
        ...

    def turn_complete(self, text: str) -> bool:
        """Return True if a turn that ended at a stop string is complete."""
        ...

    async def start(self) -> str:
        """Return the prompt, as a `MarkedText` if it contains template marks. Called once, before `step`."""
        ...

    async def step(self, action: str) -> Step:
        """Process one turn of the model. Raises EpisodeUsageError if the episode has ended."""
        ...

    async def fork(self) -> Episode:
        """Return an independent episode with the same conversation so far."""
        ...

    async def close(self) -> None:
        """Release the episode's resources. May be called more than once."""
        ...


@runtime_checkable
class ReportsRunningCall(Protocol):
    """An episode that reports the running method call of a custom class."""

    @property
    def running_call(self) -> str:
        """Name of the running or abandoned call, or "" if there is none."""
        ...


class Policy(Protocol[RolloutResult]):
    """The model's side of one rollout: encodes the prompt, samples turns and records observations.

    `end` returns the rollout: trajectories with token ids if an engine samples, or a transcript if an API endpoint
    samples.
    """

    def begin(self, prompt: str) -> None:
        """Encode the prompt. Called once, before all other methods."""
        ...

    def limit_and_trace_wait(self, episode: Episode, name: str) -> AbstractAsyncContextManager[dict[str, Any]]:
        """Trace the time spent in the episode as ``name``. Raises UnavailableError after the environment's deadline."""
        ...

    async def sample(self, episode: Episode) -> str | None:
        """Sample one turn. Returns None if the context is full."""
        ...

    async def observe(self, step: Step) -> Ended | None:
        """Record the turn's reward and append its observation.

        Returns how the rollout ended, or None if it continues.
        """
        ...

    def fork(self) -> Sequence[Policy[RolloutResult]]:
        """Return the policies of the branches in which the rollout continues, or () if it does not fork.

        Called after each turn that did not end the rollout. Must depend only on the rollout so far.
        """
        ...

    async def play_branches(self, play: Callable[[Policy[RolloutResult]], Awaitable[RolloutResult]]) -> RolloutResult:
        """Play each branch of `fork` with `play`, and return the rollout with all branches."""
        ...

    def end(self, ended: Ended) -> RolloutResult:
        """Return the finished rollout."""
        ...

    def close(self) -> None:
        """Release the engine resources that this rollout uses."""
        ...


class Environment(ABC):
    """Resources shared by the episodes of a run (sandbox, grader, threads), and the loop that plays a rollout.

    >>> class Echo(Environment):
    ...     def episode(self, problem): ...
    >>> Echo().describe()
    ['Echo']
    """

    crashes: Mapping[str, str] = {}
    """Errors of the user's program since its last successful rollout, by source line.

    Only agent programs report them.
    """

    async def open(self) -> None:
        """Acquire the shared resources. Raises an exception if a resource is not usable."""

    @abstractmethod
    def episode(self, problem: Problem) -> Episode:
        """Create an episode of ``problem``. Must be cheap, because it is called thousands of times."""

    async def rollout(self, problem: Problem, policy: Policy[RolloutResult]) -> RolloutResult:
        """Play one problem to its end by alternating between the episode and the policy.

        Raises UnavailableError if the episode fails for reasons outside the policy.
        """
        episode = self.episode(problem)
        try:
            async with policy.limit_and_trace_wait(episode, "start"):
                prompt = await episode.start()
            policy.begin(prompt)
            return await self._take_turns(episode, policy)
        finally:
            policy.close()
            await episode.close()

    async def _take_turns(self, episode: Episode, policy: Policy[RolloutResult]) -> RolloutResult:
        """Play turns until the rollout ends or forks. After a fork, play its branches to their ends."""
        forking = asyncio.Lock()

        async def branch(child: Policy[RolloutResult]) -> RolloutResult:
            async with forking, child.limit_and_trace_wait(episode, "fork"):
                twin = await episode.fork()
            try:
                return await self._take_turns(twin, child)
            finally:
                child.close()
                await twin.close()

        ended: Ended | None = None
        while ended is None:
            text = await policy.sample(episode)
            if text is None:
                return policy.end(Ended.TOKEN_LIMIT)
            async with policy.limit_and_trace_wait(episode, "environment") as facts:
                step = await episode.step(text)
                facts["tool calls"] = len(step.tool_calls)
            ended = await policy.observe(step)
            if ended is None and policy.fork():
                return await policy.play_branches(branch)
        return policy.end(ended)

    async def close(self) -> None:
        """Release the shared resources. May be called more than once."""

    def with_turns(self, max_turns: int) -> Environment:
        """Return the environment with at most ``max_turns`` turns per episode (``evaluation.max_turns``).

        The original environment remains responsible for closing the shared resources. An environment that defines a
        separate limit returns itself.
        """
        return self

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rollouts since the last call."""
        return {}

    def describe(self) -> list[str]:
        """Return lines for the console: the settings in use and their guarantees."""
        return [type(self).__name__]
