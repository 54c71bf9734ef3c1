"""The driver, which plays rollouts independently with an engine and groups their trajectories.

The engine's KV cache limits how many rollouts are in flight. A trajectory without room for its next token loses its
keys and values and recomputes them later, so new trajectories start only while the running ones have room to grow.
A *safe* number of trajectories fits at any length. Beyond it:

1. Once that many trajectories have ended, the limit is set to the number that would fit at their mean length.
2. After that, the limit grows by a quarter while the cache stays below ``rollout.kv_high_watermark``. It grows at most
   once per half a trajectory's mean duration, because the memory of new trajectories is not visible earlier.
3. Above the watermark, or after a preemption, the limit falls to three quarters of the trajectories in flight.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Final, Literal, TypeVar

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Engine
from agentrl.rollout.policy import EventLoopThrottle, TokenPolicy, TurnBarrier
from agentrl.rollout.settings import BranchingSettings, RolloutSettings
from agentrl.rollout.work_queue import PromptTooLongError
from agentrl.telemetry.trace import add_slice_since, reserve_lane, slice_start_time
from agentrl.trajectory import Group, Trajectory, concatenate_branches
from agentrl_envs.episode import Environment, UnavailableError
from agentrl_envs.rewards import Conversation, Message, WeightedRewards
from agentrl_envs.types import Ended

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
# Factors by which the limit of AdmissionControl rises and falls.
_RAISE_FACTOR = 1.25
_LOWER_FACTOR = 0.75
# Window of the moving averages, in finished trajectories: the number required before the limit may rise, and the
# largest number kept.
_MIN_AVERAGED = 8
_MAX_AVERAGED = 512
# Upper bounds in seconds on the random wait before a retry of a failed rollout: for the first retry, and for any retry.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


class AdmissionControl:
    """Admission control for trajectories, first come, first served.

    ``poll`` returns the usage of the engine's cache, or None if it is unknown. A background task polls while more
    trajectories than the safe number are in flight or any trajectory waits.
    """

    def __init__(
        self,
        poll: Callable[[], Awaitable[CacheUse | None]],
        *,
        max_trajectories: int,
        max_tokens: int,
        kv_high_watermark: float,
    ) -> None:
        """Configure admission control.

        ``max_trajectories``: maximum number of trajectories in flight. ``max_tokens``: maximum length of a
        trajectory in tokens, including its prompt. All branches of a rollout count as one trajectory.
        """
        self._poll = poll
        self._max_trajectories = max_trajectories
        self._max_tokens = max_tokens
        self._kv_high_watermark = kv_high_watermark
        self._safe_limit = 0  # trajectories that fit at any length; 0 until the engine reports its cache
        self._limit = 0
        self._last_use: CacheUse | None = None
        self._lengths: deque[int] = deque(maxlen=_MAX_AVERAGED)
        self._durations: deque[float] = deque(maxlen=_MAX_AVERAGED)
        self._changed_at = 0.0  # last time that the limit changed or the cache was too full
        self._was_lowered = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._polling: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._in_flight = 0
        # Metrics since the last call of `metrics`.
        self._lowest_limit = max_trajectories
        self._highest_use = 0.0
        self._preemptions = 0

    async def __aenter__(self) -> None:
        """Wait until another trajectory may start."""
        if self._failure is not None:
            raise self._failure
        if self._waiting or self._in_flight >= self._limit:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self._start_polling()
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled() and future.exception() is None:
                    self._in_flight -= 1  # admitted and cancelled at the same time
                self._admit_waiting()
                raise
        else:
            self._in_flight += 1
            self._start_polling()

    async def __aexit__(self, *error: object) -> None:
        self._in_flight -= 1
        self._admit_waiting()

    def record_trajectory_end(self, tokens: int, seconds: float) -> None:
        """Record that a trajectory of ``tokens`` tokens ended after ``seconds`` seconds."""
        self._lengths.append(tokens)
        self._durations.append(seconds)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, or {} if the engine does not report its cache usage."""
        if self._last_use is None:
            return {}
        metrics = {
            "rollout/concurrency_limit": self._limit,
            "rollout/concurrency_limit_min": min(self._lowest_limit, self._limit),
            "rollout/kv_use_max": self._highest_use,
            "rollout/preemptions": self._preemptions,
        }
        self._lowest_limit, self._highest_use, self._preemptions = self._limit, self._last_use.used, 0
        return metrics

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Admit waiting trajectories up to the limit, and stop polling when it is no longer needed."""
        while self._waiting and (self._waiting[0].done() or self._in_flight < self._limit):
            future = self._waiting.popleft()
            if not future.done():
                self._in_flight += 1
                future.set_result(None)
        if self._polling is not None and not self._must_poll():
            self._polling.cancel()
            self._polling = None

    def _start_polling(self) -> None:
        if self._polling is None and self._must_poll():
            self._polling = asyncio.create_task(self._poll_forever(), name="admission")
            self._polling.add_done_callback(self._propagate_failure)

    def _must_poll(self) -> bool:
        waiting = any(not future.done() for future in self._waiting)
        return waiting or (self._safe_limit < self._max_trajectories and self._in_flight > self._safe_limit)

    async def _poll_forever(self) -> None:
        while True:
            self._update_limit(await self._poll())
            self._admit_waiting()
            await asyncio.sleep(_POLL_SECONDS)

    def _propagate_failure(self, polling: asyncio.Task[None]) -> None:
        """Raise the polling task's exception in every trajectory that waits or arrives later."""
        if polling.cancelled() or (failure := polling.exception()) is None:
            return
        self._failure = failure
        for future in self._waiting:
            if not future.done():
                future.set_exception(failure)

    def _update_limit(self, use: CacheUse | None) -> None:
        if use is None:
            if self._last_use is None:  # the engine may never report its cache
                self._limit = self._max_trajectories
            return
        before, now = self._last_use or use, asyncio.get_running_loop().time()
        self._safe_limit = max(1, min(self._max_trajectories, use.tokens // self._max_tokens))
        limit = self._safe_limit if self._last_use is None else max(self._limit, self._safe_limit)
        self._last_use = use
        new = limit
        if use.used > self._kv_high_watermark or use.preemptions > before.preemptions:
            new = max(self._safe_limit, min(limit, int(self._in_flight * _LOWER_FACTOR)))
            self._was_lowered, self._changed_at = True, now
        elif self._in_flight >= limit and len(self._lengths) >= max(_MIN_AVERAGED, self._safe_limit):
            if now - self._changed_at >= fmean(self._durations) / 2:
                new = min(self._max_trajectories, max(limit + 1, int(limit * _RAISE_FACTOR)))
            if not self._was_lowered:
                fitting = int(self._kv_high_watermark * use.tokens / fmean(self._lengths))
                new = max(new, min(self._max_trajectories, fitting))
        if new != self._limit:
            self._limit, self._changed_at = new, now
        self._lowest_limit = min(self._lowest_limit, self._limit)
        self._highest_use = max(self._highest_use, use.used)
        self._preemptions += max(0, use.preemptions - before.preemptions)


_Value = TypeVar("_Value")

# Roles that users' reward functions receive for the origins of segments.
_ROLES: Final[dict[Literal["model", "observation"], Literal["assistant", "tool"]]] = {
    "model": "assistant",
    "observation": "tool",
}


NextJob = Callable[[], Awaitable[tuple[Group, int] | None]]
"""Waits until another rollout may start. Returns its group and its number in the group, or None if no rollout is left.

Number ``group.size`` is the greedy rollout."""
RecordPromptLength = Callable[[Group, int | None], None]
"""Receives each prompt's length in tokens, or None for a rollout that failed before it had a prompt.

Raises PromptTooLongError to replace the problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SharedState:
    """State shared by all rollouts of one call to :meth:`Driver.play_jobs`."""

    temperature: float
    turn_barrier: TurnBarrier | None
    throttle: EventLoopThrottle
    record_prompt_length: RecordPromptLength


@dataclass(kw_only=True)
class Driver:
    """Plays groups of rollouts, with one asyncio task per rollout in flight and no barrier between turns.

    ``deterministic`` plays turns in rounds (:class:`~agentrl.rollout.policy.TurnBarrier`), for bitwise reproducible
    runs. Randomness is keyed by ``seed``, step, problem, sample and turn. ``label`` distinguishes the trajectories of
    drivers that share an engine. ``trained``: rollouts fork as set in ``rollout.branching`` and record the supports of
    restricted sampling; with ``routed`` also their routes. ``rewards`` replace the environment's rewards.
    """

    environment: Environment
    engine: Engine
    codec: TextCodec
    settings: RolloutSettings
    seed: int
    trained: bool = False
    routed: bool = False
    deterministic: bool = False
    label: str = ""
    rewards: WeightedRewards | None = None
    last_failure: str | None = None
    """The reason for the last infrastructure failure that was not reported by an episode."""

    def __post_init__(self) -> None:
        settings = self.settings
        self._branching = settings.branching if self.trained else BranchingSettings()
        branches = self._branching.max_live_branches  # maximum for one rollout
        self._concurrency = max(1, settings.concurrency // branches)
        self._admission = AdmissionControl(
            self.engine.cache_use,
            max_trajectories=self._concurrency,
            max_tokens=branches * (settings.max_prompt_tokens + settings.max_response_tokens),
            kv_high_watermark=settings.kv_high_watermark,
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics of the admission control and the environment since the last call."""
        return self._admission.metrics() | self.environment.metrics()

    def raise_if_all_crashed(self, groups: Sequence[Group], context: str) -> None:
        """Raise SettingsError if an agent program ended every rollout of ``groups`` with the same exception.

        ``context``: the beginning of the message.
        """
        if len(self.environment.crashes) == 1 and all(item.is_excluded for group in groups for item in group.rollouts):
            (error,) = self.environment.crashes.values()
            raise SettingsError(f"{context}: every rollout failed with the same error of the agent program:\n{error}")

    def play_groups(
        self,
        requests: Sequence[Group],
        *,
        step: int,
        group_size: int,
        temperature: float | None = None,
        greedy: bool = False,
        skip_long: bool = False,
    ) -> AsyncGenerator[Group, None]:
        """Yield groups of ``group_size`` trajectories, each as soon as its last trajectory has ended.

        ``greedy``: play an additional trajectory of each problem at temperature 0. ``skip_long``: leave out problems
        with prompts over ``rollout.max_prompt_tokens``.
        """
        samples = group_size + greedy
        groups = [replace(request, size=group_size, step=step) for request in requests]
        jobs = iter([(group, sample) for group in groups for sample in range(samples)])

        async def next_job() -> tuple[Group, int] | None:
            return next(jobs, None)

        def skip_if_too_long(group: Group, tokens: int | None) -> None:
            if skip_long and tokens is not None and tokens > self.settings.max_prompt_tokens:
                raise PromptTooLongError(None)

        return self.play_jobs(
            next_job,
            greedy=greedy,
            record_prompt_length=skip_if_too_long,
            rollouts=len(requests) * samples,
            temperature=temperature,
        )

    async def play_jobs(
        self,
        next_job: NextJob,
        *,
        greedy: bool = False,
        record_prompt_length: RecordPromptLength = lambda group, tokens: None,
        rollouts: int | None = None,
        temperature: float | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Yield groups from jobs that arrive over time.

        A group contains ``size`` rollouts of a request, plus a greedy rollout if ``greedy`` is set. ``rollouts``: the
        number of jobs, if known. With ``deterministic``, turns are played in rounds only if ``rollouts`` is known.
        """
        players = self._concurrency if rollouts is None else min(self._concurrency, rollouts)
        state = _SharedState(
            temperature=self.settings.temperature if temperature is None else temperature,
            turn_barrier=TurnBarrier(players) if self.deterministic and rollouts is not None else None,
            throttle=EventLoopThrottle(),
            record_prompt_length=record_prompt_length,
        )
        played: dict[int, list[Trajectory]] = {}  # by the index of the group
        # Exclude existing objects (libraries, the model) from garbage collection while thousands of trajectories are
        # alive, because scanning these objects causes the longest pauses of the event loop.
        gc.freeze()
        try:
            async with aclosing(yield_from_tasks(players, partial(self._play_jobs, next_job, state))) as finished:
                async for group, branches in finished:
                    trajectories = played.setdefault(group.index, [])
                    trajectories += branches
                    if len({item.sample for item in trajectories}) == group.size + greedy:
                        yield _group_with_trajectories(group, played.pop(group.index))
        finally:
            gc.unfreeze()

    async def _play_jobs(
        self,
        next_job: NextJob,
        state: _SharedState,
        finished: Callable[[tuple[Group, tuple[Trajectory, ...]]], None],
    ) -> None:
        """Play one job after another, and pass each group and its new trajectories to ``finished``."""
        try:
            while (job := await next_job()) is not None:
                with reserve_lane(f"{self.label}trajectories"):
                    began = slice_start_time()
                    async with self._admission if state.turn_barrier is None else nullcontext():
                        add_slice_since(began, "wait for admission")
                        await state.throttle.wait_for_admission()
                        group, branches = await self._play(*job, state)
                        if not branches:
                            continue
                        self._admission.record_trajectory_end(
                            sum(item.length for item in branches), branches[-1].seconds
                        )
                        last = branches[-1]
                        ids = {"step": last.step, "group": last.group, "sample": last.sample}
                        add_slice_since(  # encloses the spans of the turns
                            began, f"{last.problem.id} {last.sample}", ended=str(last.ended), reward=last.reward, **ids
                        )
                        finished((group, branches))
        finally:
            if state.turn_barrier is not None:
                state.turn_barrier.remove_participant()

    async def _play(self, group: Group, sample: int, state: _SharedState) -> tuple[Group, tuple[Trajectory, ...]]:
        """Play one rollout. Replaces a skipped problem; returns no trajectories if there is no replacement.

        Retries failures outside the policy up to ``rollout.retries`` times.
        """
        failures = 0
        while True:
            try:
                branches = await self._play_once(group, sample, state)
            except PromptTooLongError as skipped:
                if skipped.replacement is None:
                    return group, ()
                group, failures = replace(skipped.replacement, step=group.step), 0
                continue
            if not all(item.ended is Ended.INFRASTRUCTURE_FAILURE for item in branches if item.receives_reward):
                break
            if failures == self.settings.retries:
                branches = (branches[-1].as_single_trajectory(),)
                break
            await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**failures) * random.uniform(0.5, 1.0))
            failures += 1
        state.record_prompt_length(group, None)  # only has an effect if the episode never started
        return group, branches

    async def _play_once(self, group: Group, sample: int, state: _SharedState) -> tuple[Trajectory, ...]:
        """Play a rollout once and return its branches.

        A rollout has several branches if it forks, if its history is rendered again, or if an agent's requests do not
        continue a single sequence.
        """
        greedy = sample == group.size
        policy = TokenPolicy(
            problem=group.problem,
            settings=self.settings,
            throttle=state.throttle,
            step=group.step,
            group=group.index,
            sample_index=sample,
            # Zero-padded, so that names sort by step, group and sample.
            name=f"{self.label}{group.step:08d}-{group.index:012d}-{sample:06d}",
            seed=self.seed,
            start_time=asyncio.get_running_loop().time(),
            engine=self.engine,
            codec=self.codec,
            temperature=0.0 if greedy else state.temperature,
            trained=self.trained and not greedy,
            routed=self.routed and not greedy,
            rewarded_later=self.rewards is not None,
            turn_barrier=state.turn_barrier,
            record_prompt_length=partial(state.record_prompt_length, group),
            branching=self._branching,
            measured=group.widths,
            live=self._branching.live,
            leaves=1 if greedy else self._branching.max_leaves,
        )
        branches = await policy.roll_out(self.environment)
        self.last_failure = policy.failure or self.last_failure
        if branches[-1].path_weight is not None:  # forked, so the environment has rewarded every path
            return branches
        last = await self._add_rewards(branches[-1], branches[:-1], state)
        if last.is_excluded:
            return (last.as_single_trajectory(),)
        return (*(replace(item, reward_elsewhere=last.reward) for item in branches[:-1]), last)

    async def _add_rewards(
        self, trajectory: Trajectory, earlier: Sequence[Trajectory], state: _SharedState
    ) -> Trajectory:
        """Return the trajectory with the rewards of ``reward.functions``, if set.

        If a function times out or is unavailable, the trajectory is excluded. ``earlier``: the rollout's other
        sequences.
        """
        if self.rewards is None or trajectory.is_excluded:
            return trajectory
        conversation = Conversation(
            turns=_messages(trajectory),
            ended=trajectory.ended,
            answer=trajectory.answer,
            environment_reward=trajectory.reward,
            earlier=tuple(map(_messages, earlier)),
        )
        try:
            score = await self.rewards(trajectory.problem, conversation, trajectory.verdict)
        except (TimeoutError, UnavailableError) as error:
            logger.warning("problem %s: %s", trajectory.problem.id, error)
            return replace(trajectory, ended=Ended.INFRASTRUCTURE_FAILURE)
        await state.throttle.wait_for_admission()
        return trajectory.with_rewards(score.turns, score.parts)


async def yield_from_tasks(
    count: int, worker: Callable[[Callable[[_Value], None]], Coroutine[object, object, None]]
) -> AsyncGenerator[_Value, None]:
    """Run ``worker`` in ``count`` tasks. Yields every value that a worker passes to the function it receives.

    Raises the exception of a failed task.
    """
    results: asyncio.Queue[Callable[[], _Value | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(worker(lambda value: results.put_nowait(lambda: value))) for _ in range(count)]
    for task in tasks:
        # ``task.result`` returns None if the task succeeded, and raises its exception if it failed.
        task.add_done_callback(lambda task: results.put_nowait(task.result))
    running = count
    try:
        while running:
            value = (await results.get())()
            if value is None:
                running -= 1
            else:
                yield value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _messages(trajectory: Trajectory) -> tuple[Message, ...]:
    return tuple(
        Message(role=_ROLES[segment.origin], text=segment.text, reward=segment.reward)
        for segment in trajectory.segments
    )


def _group_with_trajectories(group: Group, trajectories: list[Trajectory]) -> Group:
    """Return a copy of ``group`` that contains ``trajectories``."""
    trajectories.sort(key=lambda item: (item.sample, item.branch))
    greedy = [item for item in trajectories if item.sample == group.size]
    return replace(
        group,
        trajectories=tuple(
            replace(item, problem_weight=group.problem_weight) for item in trajectories if item.sample < group.size
        ),
        greedy=concatenate_branches(greedy) if greedy else None,
    )
