"""What the driver and the trainer need of any environment: `Episode` and `Environment`, both text only.

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

from typing import Protocol, runtime_checkable

from agentrl_envs.types import Problem, Step


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


@runtime_checkable
class Environment(Protocol):
    """What all episodes of a run share (sandbox, grader, threads). Open once, close once."""

    async def open(self) -> None:
        """Acquire the shared parts. Raises where they cannot work."""
        ...

    def episode(self, problem: Problem) -> Episode:
        """A fresh episode of this problem; cheap, called thousands of times."""
        ...

    async def close(self) -> None:
        """Release the shared parts. May be called more than once."""
        ...

    def describe(self) -> list[str]:
        """Lines for the console: what was found and what it guarantees."""
        ...


@runtime_checkable
class TurnLimited(Protocol):
    """An environment whose limit on turns evaluation may replace (``evaluation.max_turns``)."""

    def with_turns(self, max_turns: int) -> Environment:
        """The same environment with up to ``max_turns`` an episode. What it has opened stays this one's to close."""
        ...
