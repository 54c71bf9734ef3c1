"""Policies. A policy samples the turns of one rollout and enforces the rollout's limits.

:class:`TokenPolicy` is the only class that handles both tokens and text. A trajectory contains exactly the ids that the
engine sampled. An observation is encoded once, separately, as plain text except for marks set by the protocol. Text is
never decoded and then encoded again.

Rollouts wait at two gates: :class:`EventLoopThrottle` keeps the event loop responsive, and :class:`TurnBarrier` plays
turns in rounds, for bitwise reproducible runs.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Engine, EngineError, Sampling
from agentrl.rollout.engines.sampling import sampling_key
from agentrl.rollout.settings import BranchingSettings, RolloutSettings
from agentrl.telemetry.trace import trace_span
from agentrl.trajectory import Segment, Trajectory, assign_path_weights
from agentrl_envs.chat import MarkedText
from agentrl_envs.episode import Environment, Episode, Policy, ReportsRunningCall, RolloutResult, UnavailableError
from agentrl_envs.types import Ended, Problem, Step, ToolCall, Verdict

logger = logging.getLogger(__name__)

# Maximum number of tasks that run in one iteration of the event loop. Their work takes a few milliseconds.
_TASKS_PER_ITERATION = 16


class EventLoopThrottle:
    """Admits at most 16 tasks per iteration of the event loop, first come, first served.

    Without this limit, all work that a batch of completions triggers (decoding, parsing, starting programs) would run
    in one iteration and delay timers, new requests and cancellations. A task does not wait if the gate is free.
    """

    def __init__(self) -> None:
        self._waiting_tasks: deque[asyncio.Future[None]] = deque()
        self._admitted = 0
        self._is_scheduled = False

    async def wait_for_admission(self) -> None:
        """Wait until the current task is admitted."""
        if self._admitted < _TASKS_PER_ITERATION and not self._waiting_tasks:
            self._admitted += 1
            self._schedule_admission()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_tasks.append(future)
        self._schedule_admission()
        await future

    def _schedule_admission(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._admit_waiting_tasks)

    def _admit_waiting_tasks(self) -> None:
        self._is_scheduled = False
        self._admitted = 0
        while self._waiting_tasks and self._admitted < _TASKS_PER_ITERATION:
            future = self._waiting_tasks.popleft()
            if not future.done():
                future.set_result(None)
                self._admitted += 1
        if self._admitted:
            self._schedule_admission()


class TurnBarrier:
    """A gate before every turn. It opens when all participants are waiting, and releases them in order of request id.

    Tools may return in any order. The requests of a round reach the engine together and sorted, so a batch depends only
    on the trajectories.
    """

    def __init__(self, participants: int) -> None:
        self._participants = participants
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def wait_for_all(self, request_id: str) -> None:
        """Wait until every participant is waiting for its next turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._schedule_opening()
        try:
            await future
        finally:
            # The future is still present if the task was cancelled by its deadline while it waited.
            if self._waiting.get(request_id) is future:
                del self._waiting[request_id]

    def add_participants(self, count: int) -> None:
        """Add ``count`` participants."""
        self._participants += count

    def remove_participant(self) -> None:
        """Remove a participant that samples no further turns."""
        self._participants -= 1
        self._schedule_opening()

    def _schedule_opening(self) -> None:
        # Open the barrier in a later callback. Otherwise, the last participant would continue at once, out of order.
        asyncio.get_running_loop().call_soon(self._open_if_complete)

    def _open_if_complete(self) -> None:
        if self._participants <= 0 or len(self._waiting) < self._participants:
            return
        waiting, self._waiting = self._waiting, {}
        for request_id in sorted(waiting):
            if not waiting[request_id].done():
                waiting[request_id].set_result(None)


@dataclass(kw_only=True, eq=False)
class TurnPolicy(ABC, Generic[RolloutResult]):
    """Base class of policies that sample a rollout in turns, recorded as tokens or as text.

    ``calls``, ``verdict`` and ``answer`` come from the episode. ``failure``: the reason for a failure of the engine or
    the environment. ``turn_truncated``: the newest turn ended at a token limit. ``context_full``: the newest turn
    reached the limit of the whole response without an end-of-sequence token.
    """

    problem: Problem
    settings: RolloutSettings
    throttle: EventLoopThrottle = field(default_factory=EventLoopThrottle)
    calls: list[ToolCall] = field(default_factory=list)
    verdict: Verdict | None = None
    answer: str | None = None
    failure: str | None = None
    turn_truncated: bool = False
    context_full: bool = False
    earlier_seconds: float = 0.0
    """Seconds that programs ran before the fork at which this branch starts."""

    async def roll_out(self, environment: Environment) -> RolloutResult:
        """Play a rollout. Returns an excluded rollout if the engine fails or the environment is unavailable."""
        return await self.exclude_failures(environment.rollout(self.problem, self))

    async def exclude_failures(self, rollout: Awaitable[RolloutResult]) -> RolloutResult:
        """Return the result of ``rollout``, or an excluded rollout after a failure outside the policy."""
        try:
            return await rollout
        except EngineError as error:
            self.failure = str(error)
        except UnavailableError as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            self.failure = str(error)
        return self.end(Ended.INFRASTRUCTURE_FAILURE)

    @asynccontextmanager
    async def limit_and_trace_wait(self, episode: Episode, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Apply ``rollout.environment_deadline`` to a block that waits for ``episode``, and trace it as ``name``.

        Raises UnavailableError after the deadline.
        """
        seconds = self.settings.environment_deadline
        try:
            with trace_span(name) as facts:
                async with asyncio.timeout(seconds) as limit:
                    yield facts
        except TimeoutError:
            if not limit.expired():
                raise  # a timeout raised by the environment
            waited_for = (episode.running_call if isinstance(episode, ReportsRunningCall) else "") or "the environment"
            message = f"{waited_for} did not respond within {seconds:g} s (rollout.environment_deadline)"
            raise UnavailableError(message) from None

    async def sample(self, episode: Episode) -> str | None:
        room = self.settings.max_response_tokens - self.response_tokens
        limit = min(self.settings.max_turn_tokens, room)
        with trace_span("turn"):
            text = await self._sample_turn(episode, limit)
        self.context_full = self.context_full and limit == room
        return text

    async def observe(self, step: Step) -> Ended | None:
        await self.throttle.wait_for_admission()
        self.calls.extend(step.tool_calls)
        self.verdict, self.answer = step.verdict, step.answer
        self._record_turn_reward(0.0 if step.ended is not None and step.ended.is_excluded else step.reward)
        fits = self._append_observation(step.observation)
        if step.ended is not None:
            limited = (self.context_full and step.ended is Ended.VOID_TURN) or (
                (self.context_full or self.turn_truncated) and step.ended is Ended.STOPPED
            )
            return Ended.TOKEN_LIMIT if limited else step.ended
        if not fits or self.response_tokens >= self.settings.max_response_tokens:
            return Ended.TOKEN_LIMIT
        allowed = self.settings.program_seconds
        return Ended.DEADLINE if allowed is not None and self.program_seconds > allowed else None

    @property
    def program_seconds(self) -> float:
        """Seconds that programs and tools have run since the start of the rollout."""
        return self.earlier_seconds + sum(call.seconds for call in self.calls)

    def fork(self) -> Sequence[TurnPolicy[RolloutResult]]:
        """Return the branches in which the rollout continues after this turn, or () if it does not fork."""
        return ()

    async def play_branches(self, play: Callable[[Policy[RolloutResult]], Awaitable[RolloutResult]]) -> RolloutResult:
        """Play the branches that :meth:`fork` returns."""
        raise NotImplementedError("this policy does not fork")

    @property
    @abstractmethod
    def response_tokens(self) -> int:
        """Number of response tokens so far, including observations."""

    @abstractmethod
    def begin(self, prompt: str) -> None: ...

    @abstractmethod
    async def _sample_turn(self, episode: Episode, limit: int) -> str | None:
        """Sample a turn of at most ``limit`` tokens, and set ``turn_truncated`` and ``context_full``.

        Raises EngineError if the engine fails.
        """

    @abstractmethod
    def _record_turn_reward(self, reward: float) -> None:
        """Record the reward of the newest turn."""

    @abstractmethod
    def _append_observation(self, observation: str) -> bool:
        """Append an observation, or return False if it exceeds ``rollout.max_response_tokens``."""

    @abstractmethod
    def end(self, ended: Ended) -> RolloutResult: ...

    def close(self) -> None:
        """Release the conversation's cache in the engine."""
        return


@dataclass(kw_only=True, eq=False)
class TokenPolicy(TurnPolicy[tuple[Trajectory, ...]]):
    """Samples turns with an engine and records a rollout's exact tokens.

    ``step``, ``group`` and ``sample_index`` identify the rollout in training and, with ``seed``, key its randomness.
    ``name`` identifies the rollout in the engine. ``trained``: the engine returns the supports of restricted sampling.
    ``routed``: the engine returns routes. ``routed_tokens``: number of tokens of this branch whose routes are recorded.
    ``record_prompt_length`` receives the prompt's length in tokens and may raise. ``rewarded_later``: the environment
    may omit the reward. ``turn_barrier``: the gate before each turn, if any.

    ``branching``: where the rollout forks, with the ``measured`` widths. The prompt of a branch contains all tokens of
    its parent. ``path``: the number of the branch at each fork; the path keys the branch's randomness. ``leaves`` and
    ``live``: maximum number of leaves below the branch, and of branches that are played at the same time.
    ``earlier_tokens`` and ``earlier_turns``: tokens and turns of the response before the branch.
    """

    step: int
    group: int
    sample_index: int
    name: str
    seed: int
    start_time: float  # in seconds of the event loop's clock
    engine: Engine
    codec: TextCodec
    temperature: float = 1.0
    trained: bool = False
    routed: bool = False
    routed_tokens: int = 0
    rewarded_later: bool = False
    turn_barrier: TurnBarrier | None = None
    record_prompt_length: Callable[[int], None] = lambda tokens: None
    prompt_ids: tuple[int, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    context: tuple[int, ...] = ()
    turn: tuple[Completion, str] | None = None  # the newest turn and its text
    branching: BranchingSettings = field(default_factory=BranchingSettings)
    measured: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    leaves: int = 1
    live: int = 1
    earlier_tokens: int = 0
    earlier_turns: int = 0
    children: list[TokenPolicy] = field(default_factory=list)

    @property
    def response_tokens(self) -> int:
        return self.earlier_tokens + len(self.context) - len(self.prompt_ids)

    @property
    def turns(self) -> int:
        """Number of turns since the start of the rollout."""
        return self.earlier_turns + sum(segment.origin == "model" for segment in self.segments)

    def begin(self, prompt: str) -> None:
        self.prompt_ids = self.context = self.codec.encode_prompt(prompt)
        self.record_prompt_length(len(self.prompt_ids))

    async def _sample_turn(self, episode: Episode, limit: int) -> str:
        """Sample one turn. If a stop string does not complete the turn, sampling continues after its tokens."""
        turn = self.turns
        merged: Completion | None = None
        part = 0
        while True:
            sampled = len(merged.token_ids) if merged else 0
            piece = await self.generate(
                self.context,
                cache_sequence_id=self.name,
                limit=limit - sampled,
                stop=episode.stop_strings,
                turn=turn,
                part=part,
                routes_from=self.routed_tokens,
            )
            self.context += piece.token_ids
            self.routed_tokens = len(self.context) - 1  # the last token is computed in the next request
            merged = piece if merged is None else _concatenate(merged, piece)
            text = self.codec.decode(merged.token_ids)
            part += 1
            at_limit = len(merged.token_ids) >= limit
            if piece.finish_reason != "stop" or at_limit or episode.turn_complete(text):
                self.turn = merged, text
                self.turn_truncated = piece.finish_reason == "length"
                self.context_full = at_limit and piece.finish_reason != "eos"
                return text

    async def generate(
        self,
        context: Sequence[int],
        *,
        cache_sequence_id: str,
        limit: int,
        stop: Sequence[str],
        turn: int,
        part: int = 0,
        routes_from: int = 0,
    ) -> Completion:
        """Sample the ``part``-th piece of a turn after ``context``.

        ``cache_sequence_id``: the name of the sequence in the engine's cache.

        If the policy is routed, the completion has the routes from index ``routes_from`` on. Raises EngineError if
        the engine fails.
        """
        request_id = f"{self.name}-{turn:04d}-{part:06d}"
        if self.turn_barrier is not None:
            with trace_span("wait for other rollouts"):
                await self.turn_barrier.wait_for_all(request_id)
        completion = await self.engine.generate(
            tuple(context),
            Sampling(
                max_tokens=limit,
                temperature=self.temperature,
                top_p=self.settings.top_p,
                top_k=self.settings.top_k,
                min_p=self.settings.min_p,
                returns_support=self.trained and self.settings.restricts_sampling,
                routes_from=routes_from if self.routed else None,
                stop=tuple(stop),
            ),
            trajectory_id=cache_sequence_id,
            request_id=request_id,
            seed=sampling_key(self.seed, self.step, self.group, self.sample_index, turn, part, *self.path),
        )
        await self.throttle.wait_for_admission()
        return completion

    def _record_turn_reward(self, reward: float) -> None:
        assert self.turn is not None
        completion, text = self.turn
        self.segments.append(completion.to_segment(text, reward=reward))

    def _append_observation(self, observation: str) -> bool:
        parts = self.codec.parts_without_sampled_turn_end(observation, self.context) if observation else ()
        token_ids = self.codec.encode_parts(parts)
        fits = self.response_tokens + len(token_ids) <= self.settings.max_response_tokens
        if token_ids and fits:
            self.segments.append(Segment(origin="observation", token_ids=token_ids, text=str(MarkedText(*parts))))
            self.context += token_ids
        return fits

    def fork(self) -> Sequence[TokenPolicy]:
        """Return the branches in which the rollout continues after this turn, or () if it does not fork.

        The number of branches depends only on the rollout so far and on earlier steps. The leaves of the parent are
        divided among its branches in advance.
        """
        assert self.turn is not None
        width = self.branching.width_after(
            self.turns, leaves=self.leaves, log_probs=self.turn[0].log_probs, measured=self.measured
        )
        if width > 1:
            tracks = min(self.live, width)
            self.children = [
                replace(
                    self,
                    name=f"{self.name}.{number}",
                    path=(*self.path, number),
                    leaves=self.leaves // width + (number < self.leaves % width),
                    live=self.live // tracks + (number % tracks < self.live % tracks),
                    prompt_ids=self.context,
                    segments=[],
                    routed_tokens=0,
                    calls=[],
                    verdict=None,
                    answer=None,
                    turn=None,
                    children=[],
                    earlier_tokens=self.response_tokens,
                    earlier_turns=self.turns,
                    earlier_seconds=self.program_seconds,
                )
                for number in range(width)
            ]
        return self.children

    async def play_branches(
        self, play: Callable[[Policy[tuple[Trajectory, ...]]], Awaitable[tuple[Trajectory, ...]]]
    ) -> tuple[Trajectory, ...]:
        """Play the branches. Returns the edges of the tree, parents first.

        Branches are played on n parallel tracks. Each track plays every n-th branch, so the order of branches does not
        depend on timing.
        """
        running = min(self.live, len(self.children))
        if self.turn_barrier is not None:
            self.turn_barrier.add_participants(running - 1)

        async def track(children: Sequence[TokenPolicy]) -> list[tuple[Trajectory, ...]]:
            nonlocal running
            try:
                return [await child.exclude_failures(play(child)) for child in children]
            finally:
                running -= 1
                if running and self.turn_barrier is not None:  # the last track continues as the rollout
                    self.turn_barrier.remove_participant()

        tasks = [asyncio.create_task(track(self.children[first::running])) for first in range(running)]
        try:
            tracks = await asyncio.gather(*tasks)
        finally:  # the first exception, or a cancellation, ends the other branches
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        below = [tracks[number % len(tracks)][number // len(tracks)] for number in range(len(self.children))]
        self.failure = next((child.failure for child in self.children if child.failure), self.failure)
        total = 1 + sum(map(len, below))
        (own,) = self.end(Ended.FORKED)
        edges = [replace(own, branches=total, path_weight=1.0)]
        for part in below:
            offset = len(edges)
            edges += [
                replace(
                    item,
                    branch=offset + item.branch,
                    branches=total,
                    parent=0 if item.parent < 0 else offset + item.parent,
                    fork=own.model_tokens if item.parent < 0 else item.fork,
                    path_weight=1.0,
                )
                for item in part
            ]
        return assign_path_weights(edges)

    def end(self, ended: Ended) -> tuple[Trajectory, ...]:
        return (
            self.build_trajectory(
                prompt_ids=self.prompt_ids,
                segments=tuple(self.segments),
                ended=ended,
                verdict=self.verdict,
                answer=self.answer,
                tool_calls=tuple(self.calls),
                seconds=asyncio.get_running_loop().time() - self.start_time,
            ),
        )

    def build_trajectory(self, **fields: Any) -> Trajectory:
        """Build a trajectory of this rollout with ``fields``."""
        return Trajectory(problem=self.problem, step=self.step, group=self.group, sample=self.sample_index, **fields)

    def close(self) -> None:
        self.engine.release(self.name)


def _concatenate(first: Completion, second: Completion) -> Completion:
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        log_probs=first.log_probs + second.log_probs,
        version_spans=first.version_spans + second.version_spans,
        support_ids=[*first.support_ids, *second.support_ids],
        support_sizes=[*first.support_sizes, *second.support_sizes],
        routes=first.routes + second.routes,
    )
