"""Rewards of users' own: a function that says what a finished trajectory is worth, in place of the environment.

It is named ``module:function`` (``--reward``, ``reward.function``) and called once for every trajectory that is data,
however that ended, with what `RewardFunction` says::

    def shorter_is_better(problem, conversation, verdict):
        right = verdict is Verdict.CORRECT
        return 1.0 - 0.1 * len(conversation.turns) if right else 0.0

A plain function runs in a thread, beside others; an ``async`` one on the event loop of all rollouts, which it must not
block: what calculates, or waits without ``await``, belongs into a plain function. What it raises, or returns instead of
a finite number, ends the run with a message that names function and problem.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsFloat, TypeGuard

from agentrl_envs.adapters.blocking import BlockingCalls
from agentrl_envs.episode import EnvironmentContractError
from agentrl_envs.registry import REWARDS, PluginError, describe_error
from agentrl_envs.types import Ended, Problem, Verdict

_THREADS = 32  # plain functions that run at once


class RewardError(EnvironmentContractError):
    """A user's reward raised, or returned something else than a finite number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation: a turn of the model (``assistant``), or the observation after it (``tool``)."""

    role: Literal["assistant", "tool"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A finished trajectory as text. ``environment_reward`` is what the environment gave for it, over all turns."""

    turns: tuple[Message, ...]
    ended: Ended
    answer: str | None
    environment_reward: float


class RewardFunction(Protocol):
    """``verdict`` is the grader's; None where no answer was graded."""

    def __call__(
        self, problem: Problem, conversation: Conversation, verdict: Verdict | None, /
    ) -> float | Awaitable[float]: ...


class Reward:
    """A reward function with its deadline."""

    def __init__(self, path: str, *, deadline: float) -> None:
        """``path`` is ``module:function`` or a registered name. Raises `PluginError` where that is no function."""
        found = REWARDS[path]
        if not callable(found):
            raise PluginError(
                f"reward.function {path!r} is a {type(found).__name__}, expected a function "
                "(problem, conversation, verdict) -> float"
            )
        if not _takes(found, 3):
            raise PluginError(
                f"reward.function {path!r} cannot be called with (problem, conversation, verdict): it takes "
                f"{inspect.signature(found)}"
            )
        self._path = path
        self._function: RewardFunction = found
        self._deadline = deadline
        self._threads = BlockingCalls(_THREADS, name="reward")

    async def __call__(self, problem: Problem, conversation: Conversation, verdict: Verdict | None) -> float:
        """What the trajectory is worth. Raises `RewardError`, and TimeoutError past the deadline."""
        try:
            async with asyncio.timeout(self._deadline) as limit:
                value = await self._value(problem, conversation, verdict)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"the reward {self._path} took longer than {self._deadline:g} s") from error
            raise RewardError(self._say(problem, f"raised {describe_error(error)}")) from error
        except (Exception, SystemExit) as error:
            raise RewardError(self._say(problem, f"raised {describe_error(error)}")) from error
        if isinstance(value, bool) or not _is_number(value):
            said = f"returned {value!r:.100}, a {type(value).__name__}; valid: a finite number"
            raise RewardError(self._say(problem, said))
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):  # an integer beyond all floats, a tensor of several numbers
            number = math.nan
        if not math.isfinite(number):
            raise RewardError(self._say(problem, f"returned {value!r:.100}; valid: a finite number"))
        return number

    async def _value(self, problem: Problem, conversation: Conversation, verdict: Verdict | None) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(problem, conversation, verdict)
        value = await self._threads.run(lambda: self._function(problem, conversation, verdict))
        return await value if inspect.isawaitable(value) else value

    def _say(self, problem: Problem, what: str) -> str:
        return f"the reward {self._path} {what} (problem {problem.id})"


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether so many positional arguments fit, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it has no signature to read
        return True
    return True


def _is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whatever has a value as a float: NumPy's and torch's numbers too, but no text."""
    return hasattr(value, "__float__") and not isinstance(value, str)
