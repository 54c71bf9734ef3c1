"""Custom rewards: functions that replace the environment's reward for a finished rollout.

``reward.functions`` maps ``module:function`` to a weight. Each function is called once for every rollout that is not
excluded, with the arguments of `RewardFunction`::

    def shorter_is_better(problem, conversation, verdict):
        right = verdict is Verdict.CORRECT
        return 1.0 - 0.1 * len(conversation.turns) if right else 0.0

The reward is the weighted sum, and the value of each function is a metric. A function returns a list with one number
per model turn, or a single number, which is assigned to the last turn. A function with a parameter ``sandbox`` receives
an `agentrl_envs.execution.EpisodeSandbox`.

Synchronous functions run concurrently in threads. An ``async`` function runs on the event loop of all rollouts and must
not block it. Functions that compute, or wait without ``await``, should be synchronous. An exception or an invalid
result ends the run with a message that names the function and the problem. `UnavailableError` excludes the rollout.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from agentrl_envs.episode import EnvironmentContractError, UnavailableError
from agentrl_envs.execution import EpisodeSandbox
from agentrl_envs.registry import REWARDS, PluginError, describe_error
from agentrl_envs.settings import ExecutionSettings
from agentrl_envs.threads import BlockingCallPool
from agentrl_envs.tools.calling import indicates_unreachable_service
from agentrl_envs.tools.schema import injected_parameters
from agentrl_envs.types import Ended, Problem, Verdict, as_reward
from agentrl_sandbox.client import Sandbox, SandboxSettings, open_sandbox

_MAX_THREADS = 32  # concurrent calls of synchronous functions


class RewardError(EnvironmentContractError):
    """A custom reward raised an exception or returned an invalid value."""


ENVIRONMENT = "environment"
"""Name of the environment's reward among the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation: a model turn (``assistant``) or the observation after it (``tool``).

    ``reward`` is the environment's reward of the turn.
    """

    role: Literal["assistant", "tool"]
    text: str
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A finished rollout as text. ``environment_reward`` is the environment's reward, summed over the turns.

    For an agent's rollout with several trajectories, ``turns`` is the last trajectory, and ``earlier`` contains all
    other trajectories in the order in which they ended.
    """

    turns: tuple[Message, ...]
    ended: Ended
    answer: str | None
    environment_reward: float
    earlier: tuple[tuple[Message, ...], ...] = ()

    @property
    def sequences(self) -> tuple[tuple[Message, ...], ...]:
        """All trajectories of the rollout. Only an agent with a branched history has several."""
        return (*self.earlier, self.turns)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The environment's reward of each model turn."""
        return tuple(turn.reward for turn in self.turns if turn.role == "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSum:
    """The reward of each model turn, and the total of each function by name."""

    turns: tuple[float, ...]
    parts: Mapping[str, float]


class RewardFunction(Protocol):
    """Signature of a reward function.

    ``verdict`` is None if no answer was graded. An additional parameter ``sandbox`` is optional.
    """

    def __call__(
        self, problem: Problem, conversation: Conversation, verdict: Verdict | None, /
    ) -> float | Sequence[float] | Awaitable[float | Sequence[float]]: ...


class TimedRewardFunction:
    """One reward function with its time limit."""

    def __init__(self, path: str, *, deadline: float) -> None:
        """Import the function at ``path`` (``module:function`` or a registered name).

        Raises PluginError unless the object is a function of three arguments.
        """
        function = REWARDS[path]
        if not callable(function):
            raise PluginError(
                f"reward.functions {path!r} is a {type(function).__name__}, but must be a function "
                "(problem, conversation, verdict) -> float"
            )
        self._injected = injected_parameters(function, ("sandbox",))
        if not _accepts_arguments(function, 3, self._injected):
            raise PluginError(
                f"reward.functions {path!r} cannot be called with (problem, conversation, verdict): its parameters are "
                f"{inspect.signature(function)}"
            )
        self.path = path
        self._function: Callable[..., object] = function
        self._deadline = deadline
        self._threads = BlockingCallPool(_MAX_THREADS, name="reward")

    @property
    def needs_sandbox(self) -> bool:
        """True if the function has a parameter ``sandbox``."""
        return bool(self._injected)

    async def __call__(
        self,
        problem: Problem,
        conversation: Conversation,
        verdict: Verdict | None,
        sandbox: EpisodeSandbox | None = None,
    ) -> tuple[float, ...]:
        """Return the reward of each turn.

        Raises RewardError if the function fails or returns an invalid value, UnavailableError if a service does not
        respond, and TimeoutError after the deadline.
        """
        options = {"sandbox": sandbox} if self._injected else {}
        call = functools.partial(self._function, problem, conversation, verdict, **options)
        try:
            async with asyncio.timeout(self._deadline) as limit:
                value = await self._call_function(call)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"the reward {self.path} took longer than {self._deadline:g} s") from error
            raise RewardError(self._error_message(problem, f"raised {describe_error(error)}")) from error
        except UnavailableError:
            raise
        except (Exception, SystemExit) as error:
            if indicates_unreachable_service(error):
                raise UnavailableError(self._error_message(problem, f"raised {describe_error(error)}")) from error
            raise RewardError(self._error_message(problem, f"raised {describe_error(error)}")) from error
        turns = sum(turn.role == "assistant" for turn in conversation.turns)
        if not isinstance(value, (list, tuple)):
            return (0.0,) * (turns - 1) + (self._check_reward(problem, value),)
        if len(value) != turns:
            message = f"returned {len(value)} numbers for {turns} model turns"
            raise RewardError(self._error_message(problem, message))
        return tuple(self._check_reward(problem, item) for item in value)

    async def _call_function(self, call: Callable[[], object]) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await cast("Awaitable[object]", call())
        value = await self._threads.run(call)
        return await value if inspect.isawaitable(value) else value

    def _check_reward(self, problem: Problem, value: object) -> float:
        try:
            return as_reward(value)
        except ValueError as error:
            raise RewardError(
                self._error_message(problem, f"returned {error}, or a list with one such number per model turn")
            ) from None

    def _error_message(self, problem: Problem, what: str) -> str:
        return f"the reward {self.path} {what} (problem {problem.id})"


class WeightedRewards:
    """The functions of ``reward.functions`` with their weights. Must be opened before the first call."""

    def __init__(self, weights: Mapping[str, float], *, deadline: float, sandbox: SandboxSettings) -> None:
        """Import the functions. Raises PluginError for an invalid function."""
        self._weights = dict(weights)
        self._functions = [TimedRewardFunction(path, deadline=deadline) for path in weights if path != ENVIRONMENT]
        self._settings = sandbox
        self._sandbox: Sandbox | None = None
        short = {path: path.rpartition(":")[2] for path in weights}
        counts = Counter(short.values())
        self._names = {path: name if counts[name] == 1 else path for path, name in short.items()}

    async def open(self) -> None:
        """Open a sandbox if a function requires it. Raises `agentrl_sandbox.client.SandboxError` if this fails."""
        if self._sandbox is None and any(function.needs_sandbox for function in self._functions):
            self._sandbox = await open_sandbox(self._settings)

    async def close(self) -> None:
        """Close the sandbox. May be called more than once."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def __call__(self, problem: Problem, conversation: Conversation, verdict: Verdict | None) -> RewardSum:
        """Call all functions concurrently.

        Raises the errors of `TimedRewardFunction`, and RewardError if the weighted sum for a turn is too large.
        """
        sandbox = None if self._sandbox is None else EpisodeSandbox(self._sandbox, ExecutionSettings())
        values = await asyncio.gather(
            *(function(problem, conversation, verdict, sandbox) for function in self._functions)
        )
        by_path = dict(zip((function.path for function in self._functions), values, strict=True))
        if ENVIRONMENT in self._weights:
            by_path[ENVIRONMENT] = conversation.turn_rewards
        weighted = [[weight * value for value in by_path[path]] for path, weight in self._weights.items()]
        try:
            turns = tuple(as_reward(math.fsum(turn)) for turn in zip(*weighted, strict=True))
        except ValueError as error:
            raise RewardError(
                f"problem {problem.id}: the weighted sum of reward.functions for a turn is {error}; lower the weights"
            ) from None
        return RewardSum(
            turns=turns,
            parts={self._names[path]: math.fsum(by_path[path]) for path in self._weights},
        )


def _accepts_arguments(function: Callable[..., object], count: int, named: Sequence[str]) -> bool:
    """Return True if a call with ``count`` positional arguments and the keywords ``named`` matches the signature.

    Also returns True if the signature is unknown.
    """
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(named))
    except TypeError:
        return False
    except ValueError:  # C functions may have no signature
        return True
    return True
