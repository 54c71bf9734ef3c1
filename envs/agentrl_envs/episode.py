"""What the driver and the trainer need of any environment: `Episode`, `Policy` and `Environment`, text only.

AgentRLEnvError
├── EpisodeUsageError        a call out of order: a bug of the caller
├── registry.PluginError     what a user named cannot be found, imported or used
│   ├── registry.UnknownNameError
│   └── registry.NameTakenError
├── UnavailableError         a service that an episode needs does not answer: no data
├── EnvironmentContractError a user's environment, tool or reward that does not keep its contract
│   ├── tools.ToolError
│   └── rewards.RewardError
└── grading.GraderError      the grader's processes cannot work
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from agentrl_envs.types import Ended, Problem, Step

Played = TypeVar("Played", covariant=True)


class AgentRLEnvError(Exception):
    """Root of this package's errors."""


class EpisodeUsageError(AgentRLEnvError, RuntimeError):
    """An episode was stepped before its start, after its end or after it was closed."""


class EnvironmentContractError(AgentRLEnvError, TypeError):
    """A user's environment, tool or reward raised, or returned something that it must not."""


class UnavailableError(AgentRLEnvError):
    """A service that an environment, a tool or a reward needs does not answer; users' code may raise it as well.

    The trajectory is an infrastructure failure: it is played again, and never counts against the policy.
    """

    def __init__(self, message: str, *, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


@runtime_checkable
class Episode(Protocol):
    """One problem, played once. Speaks text only, never token ids.

    The driver samples until a stop string or the end of sequence; at a stop string where `turn_complete` (of the
    turn's whole text so far) is False it continues the same turn. Then it calls `step` with the turn's text.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at which the engine stops generating."""
        ...

    def turn_complete(self, text: str) -> bool:
        """Whether a turn that was stopped by a stop string is over."""
        ...

    async def start(self) -> str:
        """The prompt's text, a `MarkedText` where marks of a chat template stand in it. Called once, first."""
        ...

    async def step(self, action: str) -> Step:
        """Answer one turn of the model. Raises `EpisodeUsageError` once the episode has ended."""
        ...

    async def fork(self) -> Episode:
        """An independent episode with the same conversation so far."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. May be called more than once."""
        ...


@runtime_checkable
class NamesCalls(Protocol):
    """An episode that knows which call of the user's it waits for."""

    @property
    def calling(self) -> str:
        """The call under way, or the one that was given up; empty if there is none."""
        ...


class Policy(Protocol[Played]):
    """The model as the player of one rollout. Encodes, samples and records what is said; ``end`` returns the rollout.

    With an engine the result is the rollout's trajectories, token by token; with an endpoint it is a transcript.
    """

    def begin(self, prompt: str) -> None:
        """Encode the prompt. Called once, first."""
        ...

    def waiting(self, episode: Episode, name: str) -> AbstractAsyncContextManager[dict[str, Any]]:
        """Trace a wait for the episode under ``name``. Raises UnavailableError past the environment's deadline."""
        ...

    async def sample(self, episode: Episode) -> str | None:
        """Sample one turn; None if the context is full."""
        ...

    async def observe(self, step: Step) -> Ended | None:
        """Record the turn's reward and append its observation. Returns how the rollout ended, or None if it goes on."""
        ...

    def end(self, ended: Ended) -> Played:
        """Return what was played."""
        ...

    def close(self) -> None:
        """Release what the engine holds for the rollout."""
        ...


class Environment(ABC):
    """The resources that all episodes of a run share (sandbox, grader, threads), and the way a rollout is played.

    >>> class Echo(Environment):
    ...     def episode(self, problem): ...
    >>> Echo().describe()
    ['Echo']
    """

    crashes: Mapping[str, str] = {}
    """Errors of the user's program since the last rollout without one, by place; only agent programs have them."""

    async def open(self) -> None:
        """Acquire the shared resources. Raises if they cannot work."""

    @abstractmethod
    def episode(self, problem: Problem) -> Episode:
        """A fresh episode of this problem; cheap, called thousands of times."""

    async def rollout(self, problem: Problem, policy: Policy[Played]) -> Played:
        """Play one problem to its end: the episode and the policy take turns.

        Raises UnavailableError if the episode fails for reasons outside the policy.
        """
        episode = self.episode(problem)
        ended: Ended | None = None
        try:
            async with policy.waiting(episode, "start"):
                prompt = await episode.start()
            policy.begin(prompt)
            while ended is None:
                text = await policy.sample(episode)
                if text is None:
                    return policy.end(Ended.TOKEN_LIMIT)
                async with policy.waiting(episode, "environment") as facts:
                    step = await episode.step(text)
                    facts["tool calls"] = len(step.tool_calls)
                ended = await policy.observe(step)
            return policy.end(ended)
        finally:
            policy.close()
            await episode.close()

    async def close(self) -> None:
        """Release the shared resources. May be called more than once."""

    def with_turns(self, max_turns: int) -> Environment:
        """The same environment with up to ``max_turns`` per episode (``evaluation.max_turns``).

        The original environment still closes what it has opened. An environment with its own limit returns itself.
        """
        return self

    def metrics(self) -> dict[str, float]:
        """Metrics of the rollouts since the last call."""
        return {}

    def describe(self) -> list[str]:
        """Lines for the console: the settings in use and what they guarantee."""
        return [type(self).__name__]
