"""The loop of a conversation between an episode and a policy: turns, limits and how it ends.

Training and evaluation share this loop, over engines that speak tokens and over endpoints that speak only text. What
differs is the bookkeeping: a :class:`TurnSampler` samples turns and records what was said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.gates import FairYield
from agentrl.rollout.settings import RolloutSettings
from agentrl.telemetry.trace import span
from agentrl_envs.episode import Environment, Episode, NamesCalls, UnavailableError
from agentrl_envs.types import Ended, Problem, Step, ToolCall, Verdict

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    """A turn's text. ``cut``: its token limit ended it; ``full``: its limit is reached, without an end of sequence."""

    text: str
    cut: bool
    full: bool


class TurnSampler(Protocol):
    """Samples the turns of one conversation and records what was said, in tokens or in text."""

    @property
    def used(self) -> int:
        """Tokens of the response so far, including those of observations."""
        ...

    def begin(self, prompt: str) -> None: ...

    async def sample(self, episode: Episode, limit: int) -> SampledTurn | None:
        """One turn of at most ``limit`` tokens; None if the model can read no more. Raises EngineError."""
        ...

    def credit(self, reward: float) -> None:
        """Record the reward of the turn, to which the episode has replied."""
        ...

    def observe(self, text: str, most: int) -> bool:
        """Record what the model is shown next. Returns False, without recording, if ``used`` would exceed ``most``."""
        ...

    def close(self) -> None:
        """Release what the engine holds for the conversation."""
        ...


class _NoAnswerError(Exception):
    """An environment has not answered in time, so the conversation is no evidence about the policy."""


@dataclass(kw_only=True, slots=True)
class TurnLoop:
    """Plays one conversation. ``failure``: why the engine or a silent environment ended it."""

    problem: Problem
    sampler: TurnSampler
    settings: RolloutSettings
    fair_yield: FairYield
    calls: list[ToolCall] = field(default_factory=list)
    verdict: Verdict | None = None
    answer: str | None = None
    failure: str | None = None

    async def play(self, environment: Environment) -> Ended:
        """Play to the end. An infrastructure failure: a failed engine, a service that is gone, a silent environment."""
        episode = environment.episode(self.problem)
        try:
            return await self._turns(episode)
        except EngineError as error:
            self.failure = str(error)
        except (_NoAnswerError, UnavailableError) as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            self.failure = str(error)
        finally:
            self.sampler.close()
            await episode.close()
        return Ended.INFRASTRUCTURE_FAILURE

    async def _turns(self, episode: Episode) -> Ended:
        with span("start"):
            self.sampler.begin(await self._reply(episode, episode.start()))
        while True:
            room = self.settings.max_response_tokens - self.sampler.used
            limit = min(self.settings.max_turn_tokens, room)
            with span("turn"):
                turn = await self.sampler.sample(episode, limit)
            if turn is None:
                return Ended.TOKEN_LIMIT
            with span("environment") as facts:
                step = await self._reply(episode, episode.step(turn.text))
                facts["tool calls"] = len(step.tool_calls)
            await self.fair_yield.wait()
            ended = self._ended(step, turn, full=turn.full and limit == room)
            if ended is not None:
                return ended

    def _ended(self, step: Step, turn: SampledTurn, *, full: bool) -> Ended | None:
        """Record a turn's reply. Returns how the conversation ended, or None if it continues.

        ``full``: the limit on the whole response ended the turn.
        """
        most = self.settings.max_response_tokens
        self.calls.extend(step.tool_calls)
        self.verdict, self.answer = step.verdict, step.answer
        self.sampler.credit(0.0 if step.ended is not None and step.ended.is_no_data else step.reward)
        fits = self.sampler.observe(step.observation, most)
        if step.ended is not None:
            limited = (full and step.ended is Ended.VOID_TURN) or ((full or turn.cut) and step.ended is Ended.STOPPED)
            return Ended.TOKEN_LIMIT if limited else step.ended
        if not fits or self.sampler.used >= most:
            return Ended.TOKEN_LIMIT
        allowed = self.settings.program_seconds
        return Ended.DEADLINE if allowed is not None and sum(call.seconds for call in self.calls) > allowed else None

    async def _reply(self, episode: Episode, reply: Awaitable[_Value]) -> _Value:
        """An episode's reply to a start or a turn. Raises _NoAnswerError past ``environment_deadline``."""
        seconds = self.settings.environment_deadline
        try:
            async with asyncio.timeout(seconds) as limit:
                return await reply
        except TimeoutError:
            if not limit.expired():
                raise  # not this deadline
            silent = (episode.calling if isinstance(episode, NamesCalls) else "") or "the environment"
            said = f"{silent} gave no answer within {seconds:g} s (rollout.environment_deadline)"
            raise _NoAnswerError(said) from None


async def pooled(
    players: int, player: Callable[[Callable[[_Value], None]], Coroutine[object, object, None]]
) -> AsyncGenerator[_Value, None]:
    """Yield what ``players`` tasks of ``player`` hand over, until all have ended. A crash of one raises here."""
    handed: asyncio.Queue[_Value | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(player(handed.put_nowait)) for _ in range(players)]
    for task in tasks:
        task.add_done_callback(handed.put_nowait)
    running = players
    try:
        while running:
            item = await handed.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
