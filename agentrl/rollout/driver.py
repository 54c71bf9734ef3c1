"""The driver: plays rollouts independently with an engine, and forms groups of their trajectories.

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
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Final, Literal, TypeVar

import stamina

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Engine
from agentrl.rollout.policy import LoopThrottle, TokenPolicy, TurnBarrier
from agentrl.rollout.settings import BranchingSettings, RolloutSettings
from agentrl.rollout.work_queue import SkippedProblemError
from agentrl.telemetry.trace import add_slice_since, reserve_lane, start_time
from agentrl.trajectory import Group, Trajectory, concatenate_branches
from agentrl_envs.episode import Environment, UnavailableError
from agentrl_envs.rewards import Conversation, Message, Rewards
from agentrl_envs.types import Ended

logger = logging.getLogger(__name__)

# Seconds between polls of the engine.
_POLL = 2.0
# Factors by which the limit grows and falls.
_GROWTH = 1.25
_RETREAT = 0.75
# Minimum number of ended trajectories for an average.
_ENOUGH = 8
# Maximum number of recent trajectories in an average.
_REMEMBERED = 512


class Admission:
    """Admission control for trajectories, first come, first served.

    ``poll`` returns the usage of the engine's cache, or None if it is unknown. A background task polls while more
    trajectories than the safe number are in flight or any trajectory waits.
    """

    def __init__(
        self, poll: Callable[[], Awaitable[CacheUse | None]], *, ceiling: int, longest: int, kv_high_watermark: float
    ) -> None:
        """Configure admission control.

        ``ceiling``: maximum number of trajectories in flight. ``longest``: maximum tokens of a trajectory, including
        its prompt. All branches of a rollout count as one trajectory.
        """
        self._poll = poll
        self._ceiling = ceiling
        self._longest = longest
        self._kv_high_watermark = kv_high_watermark
        self._safe = 0  # not known yet
        self._limit = 0
        self._last: CacheUse | None = None
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        self._lives: deque[float] = deque(maxlen=_REMEMBERED)
        self._changed_at = 0.0  # when the limit changed or the cache was too full
        self._retreated = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._in_flight = 0
        self._lowest = ceiling
        self._most_used = 0.0
        self._preempted = 0

    async def __aenter__(self) -> None:
        """Wait until another trajectory may run."""
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
                self._admit()
                raise
        else:
            self._in_flight += 1
            self._start_polling()

    async def __aexit__(self, *error: object) -> None:
        self._in_flight -= 1
        self._admit()

    def record_end(self, tokens: int, seconds: float) -> None:
        """Record that a trajectory of ``tokens`` tokens ended after ``seconds`` seconds."""
        self._lengths.append(tokens)
        self._lives.append(seconds)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, or {} if the engine does not report its cache usage."""
        if self._last is None:
            return {}
        metrics = {
            "rollout/concurrency_limit": self._limit,
            "rollout/concurrency_limit_min": min(self._lowest, self._limit),
            "rollout/kv_use_max": self._most_used,
            "rollout/preemptions": self._preempted,
        }
        self._lowest, self._most_used, self._preempted = self._limit, self._last.used, 0
        return metrics

    # -- inside ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting trajectories up to the limit, and stop polling when it is no longer needed."""
        while self._waiting and (self._waiting[0].done() or self._in_flight < self._limit):
            future = self._waiting.popleft()
            if not future.done():
                self._in_flight += 1
                future.set_result(None)
        if self._watch is not None and not self._must_poll():
            self._watch.cancel()
            self._watch = None

    def _start_polling(self) -> None:
        if self._watch is None and self._must_poll():
            self._watch = asyncio.create_task(self._poll_forever(), name="admission")
            self._watch.add_done_callback(self._crashed)

    def _must_poll(self) -> bool:
        waiting = any(not future.done() for future in self._waiting)
        return waiting or (self._safe < self._ceiling and self._in_flight > self._safe)

    async def _poll_forever(self) -> None:
        while True:
            self._update(await self._poll())
            self._admit()
            await asyncio.sleep(_POLL)

    def _crashed(self, watch: asyncio.Task[None]) -> None:
        """Propagate a failure of the polling task to every waiting or later trajectory."""
        if watch.cancelled() or (failure := watch.exception()) is None:
            return
        self._failure = failure
        for future in self._waiting:
            if not future.done():
                future.set_exception(failure)

    def _update(self, use: CacheUse | None) -> None:
        if use is None:
            if self._last is None:  # the engine may never report
                self._limit = self._ceiling
            return
        before, now = self._last or use, asyncio.get_running_loop().time()
        self._safe = max_fitting_trajectories(use, longest=self._longest, ceiling=self._ceiling)
        limit = self._safe if self._last is None else max(self._limit, self._safe)
        self._last = use
        new = limit
        if use.used > self._kv_high_watermark or use.preemptions > before.preemptions:
            new = max(self._safe, min(limit, int(self._in_flight * _RETREAT)))
            self._retreated, self._changed_at = True, now
        elif self._in_flight >= limit and len(self._lengths) >= max(_ENOUGH, self._safe):
            if now - self._changed_at >= fmean(self._lives) / 2:
                new = min(self._ceiling, max(limit + 1, int(limit * _GROWTH)))
            if not self._retreated:
                new = max(new, min(self._ceiling, int(self._kv_high_watermark * use.tokens / fmean(self._lengths))))
        if new != self._limit:
            self._limit, self._changed_at = new, now
        self._lowest = min(self._lowest, self._limit)
        self._most_used = max(self._most_used, use.used)
        self._preempted += max(0, use.preemptions - before.preemptions)


def max_fitting_trajectories(use: CacheUse, *, longest: int, ceiling: int) -> int:
    """Return the number of trajectories (at least 1) that fit into the cache at any length.

    >>> max_fitting_trajectories(CacheUse(tokens=10_000, used=0.0, preemptions=0), longest=2_000, ceiling=100)
    5
    """
    return max(1, min(ceiling, use.tokens // longest))


_Value = TypeVar("_Value")

# Roles that users' reward functions receive for the origins of segments.
_ROLES: Final[dict[Literal["model", "observation"], Literal["assistant", "tool"]]] = {
    "model": "assistant",
    "observation": "tool",
}


Jobs = Callable[[], Awaitable[tuple[Group, int] | None]]
"""Waits until another rollout may start, and returns its group and its number in the group, or None if there are no
more. Number ``size`` is the greedy rollout. Shared by all players."""
Measure = Callable[[Group, int | None], None]
"""Receives each prompt's length in tokens, or None for a rollout that failed before it had a prompt.

Raises SkippedProblemError to replace the problem."""


def _unmeasured(request: Group, tokens: int | None) -> None:
    """Accept a prompt of any length."""


class _InfrastructureFailureError(Exception):
    """Raised inside the retry loop for a trajectory that failed for reasons outside the policy."""

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__(f"problem {trajectory.problem.id}: infrastructure failure")
        self.trajectory = trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """State shared by all trajectories of one call to :meth:`Driver.run` or :meth:`Driver.run_jobs`."""

    temperature: float
    rounds: TurnBarrier | None
    fair_yield: LoopThrottle
    measure: Measure
    branching: BranchingSettings
    admission: Admission
    trained: bool


@dataclass(kw_only=True)
class Driver:
    """Plays groups of trajectories, with one asyncio task per trajectory in flight and no barrier between turns.

    ``deterministic`` plays turns in rounds (:class:`~agentrl.rollout.policy.TurnBarrier`), for bitwise reproducible
    runs. Randomness is keyed by ``seed``, step, problem, sample and turn. ``label`` distinguishes the trajectories of
    drivers that share an engine. ``routed``: rollouts of `run_jobs` record their routes. ``rewards`` replace the
    environment's rewards.
    """

    environment: Environment
    engine: Engine
    codec: TextCodec
    settings: RolloutSettings
    seed: int
    routed: bool = False
    deterministic: bool = False
    label: str = ""
    rewards: Rewards | None = None
    last_failure: str | None = None
    """The reason for the last infrastructure failure that was not reported by an episode."""

    def __post_init__(self) -> None:
        # By the maximum number of live branches of a rollout: `run` never forks, `run_jobs` forks as set.
        self._admissions = {live: self._new_admission(live) for live in (1, self.settings.branching.most_live)}

    def _new_admission(self, live: int) -> Admission:
        """Create the admission control of rollouts with up to ``live`` branches. Each branch counts as a trajectory."""
        settings = self.settings
        return Admission(
            self.engine.cache_use,
            ceiling=self._concurrency(live),
            longest=live * (settings.max_prompt_tokens + settings.max_response_tokens),
            kv_high_watermark=settings.kv_high_watermark,
        )

    def _concurrency(self, live: int) -> int:
        """Return the maximum number of concurrent rollouts with up to ``live`` branches at the same time."""
        return max(1, self.settings.concurrency // live)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the admission of `run_jobs` and of the environment since the last call."""
        return self._admissions[self.settings.branching.most_live].metrics() | self.environment.metrics()

    def raise_if_all_crashed(self, groups: Sequence[Group], what: str) -> None:
        """Raise SettingsError if an agent program ended every rollout of ``groups`` with the same exception."""
        if len(self.environment.crashes) == 1 and all(item.is_excluded for group in groups for item in group.rollouts):
            (error,) = self.environment.crashes.values()
            raise SettingsError(f"{what}: every rollout failed with the same error of the agent program:\n{error}")

    def run(
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
        sized = [replace(request, size=group_size, step=step) for request in requests]
        listed = iter([(request, sample) for request in sized for sample in range(samples)])

        async def jobs() -> tuple[Group, int] | None:
            return next(listed, None)

        temperature = self.settings.temperature if temperature is None else temperature
        rollouts = len(requests) * samples
        measure = self._skip_long if skip_long else _unmeasured
        return self._run(jobs, greedy=greedy, rollouts=rollouts, temperature=temperature, measure=measure)

    def _skip_long(self, request: Group, tokens: int | None) -> None:
        if tokens is not None and tokens > self.settings.max_prompt_tokens:
            raise SkippedProblemError(None)

    def run_jobs(
        self,
        jobs: Jobs,
        *,
        greedy: bool = False,
        measure: Measure = _unmeasured,
        rollouts: int | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Yield groups from jobs that arrive over time, for training.

        A group contains ``size`` rollouts of a request, plus a greedy one if ``greedy`` is set. Rollouts fork as set in
        ``rollout.branching``. ``rollouts``: the number of jobs, if known. With ``deterministic``, turns are played in
        rounds only if the number is known.
        """
        return self._run(
            jobs,
            greedy=greedy,
            rollouts=rollouts,
            temperature=self.settings.temperature,
            measure=measure,
            branching=self.settings.branching,
            trained=True,
        )

    async def _run(
        self,
        jobs: Jobs,
        *,
        greedy: bool,
        rollouts: int | None,
        temperature: float,
        measure: Measure = _unmeasured,
        branching: BranchingSettings | None = None,
        trained: bool = False,
    ) -> AsyncGenerator[Group, None]:
        """Assemble groups from finished trajectories."""
        branching = branching or BranchingSettings()
        concurrency = self._concurrency(branching.most_live)
        players = concurrency if rollouts is None else min(concurrency, rollouts)
        running = _Running(
            temperature=temperature,
            rounds=TurnBarrier(players) if self.deterministic and rollouts is not None else None,
            fair_yield=LoopThrottle(),
            measure=measure,
            branching=branching,
            admission=self._admissions[branching.most_live],
            trained=trained,
        )
        parts: dict[int, list[Trajectory]] = {}
        # Exclude existing objects (libraries, the model) from garbage collection while thousands of trajectories are
        # alive, because scanning these objects causes the longest pauses of the event loop.
        gc.freeze()
        try:
            async with aclosing(run_tasks(players, partial(self._player, jobs, running))) as finished:
                async for group, branches in finished:
                    part = parts.setdefault(group.index, [])
                    part += branches
                    if len({item.sample for item in part}) == group.size + greedy:
                        yield _played(group, parts.pop(group.index))
        finally:
            gc.unfreeze()

    async def _player(
        self,
        jobs: Jobs,
        running: _Running,
        finished: Callable[[tuple[Group, tuple[Trajectory, ...]]], None],
    ) -> None:
        try:
            while (job := await jobs()) is not None:
                with reserve_lane(f"{self.label}trajectories"):
                    began = start_time()
                    async with running.admission if running.rounds is None else nullcontext():
                        add_slice_since(began, "wait for admission")
                        await running.fair_yield.wait()
                        group, branches = await self._measured(*job, running)
                        if not branches:
                            continue
                        running.admission.record_end(sum(item.length for item in branches), branches[-1].seconds)
                        _trace(branches[-1], began)
                        finished((group, branches))
        finally:
            if running.rounds is not None:
                running.rounds.remove_participant()

    async def _measured(self, group: Group, sample: int, running: _Running) -> tuple[Group, tuple[Trajectory, ...]]:
        """Play one rollout, replacing skipped problems. Returns () if a skipped problem has no replacement."""
        while True:
            try:
                branches = await self._rollout(group, sample, running)
            except SkippedProblemError as skipped:
                if skipped.replacement is None:
                    return group, ()
                group = replace(skipped.replacement, step=group.step)
            else:
                running.measure(group, None)  # no effect unless the episode never started
                return group, branches

    async def _rollout(self, group: Group, sample: int, running: _Running) -> tuple[Trajectory, ...]:
        """Play one rollout. Retries it up to ``rollout.retries`` times after a failure outside the policy."""
        branches = await self._attempt(group, sample, running)
        if not _failed(branches):
            return branches
        try:
            async for attempt in stamina.retry_context(
                on=_InfrastructureFailureError, attempts=self.settings.retries + 1, timeout=None, wait_max=10.0
            ):
                with attempt:
                    # The first attempt ran above, so that only failures pay for the overhead of retrying.
                    if attempt.num > 1:
                        branches = await self._attempt(group, sample, running)
                    if _failed(branches):
                        raise _InfrastructureFailureError(branches[-1])
        except _InfrastructureFailureError as failure:
            return (failure.trajectory.as_single_trajectory(),)
        return branches

    async def _attempt(self, group: Group, sample: int, running: _Running) -> tuple[Trajectory, ...]:
        """Play a rollout once. Returns its branches. Agents and re-rendered histories can have several."""
        greedy = sample == group.size
        policy = TokenPolicy(
            problem=group.problem,
            settings=self.settings,
            fair_yield=running.fair_yield,
            step=group.step,
            group=group.index,
            sample_index=sample,
            # Zero-padded, so that names sort in the order of requests, samples and turns.
            name=f"{self.label}{group.step:08d}-{group.index:012d}-{sample:06d}",
            seed=self.seed,
            start_time=asyncio.get_running_loop().time(),
            engine=self.engine,
            codec=self.codec,
            temperature=0.0 if greedy else running.temperature,
            trained=running.trained and not greedy,
            routed=self.routed and running.trained and not greedy,
            rewarded_later=self.rewards is not None,
            turn_barrier=running.rounds,
            measure=partial(running.measure, group),
            branching=running.branching,
            measured=group.widths,
            live=running.branching.live,
            leaves=1 if greedy else running.branching.most_leaves,
        )
        branches = await policy.roll_out(self.environment)
        self.last_failure = policy.failure or self.last_failure
        if branches[-1].path_weight is not None:  # forked, so the environment has rewarded every path
            return branches
        last = await self._rewarded(branches[-1], running, earlier=branches[:-1])
        if last.is_excluded:
            return (last.as_single_trajectory(),)
        return (*(replace(item, reward_elsewhere=last.reward) for item in branches[:-1]), last)

    async def _rewarded(
        self, trajectory: Trajectory, running: _Running, *, earlier: Sequence[Trajectory] = ()
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
        await running.fair_yield.wait()
        return trajectory.with_rewards(score.turns, score.parts)


def _failed(branches: Sequence[Trajectory]) -> bool:
    """Return True if all ends of the rollout are infrastructure failures."""
    return all(item.ended is Ended.INFRASTRUCTURE_FAILURE for item in branches if item.receives_reward)


async def run_tasks(
    count: int, worker: Callable[[Callable[[_Value], None]], Coroutine[object, object, None]]
) -> AsyncGenerator[_Value, None]:
    """Run ``players`` tasks of ``player`` and yield their values. Raises the exception of a failed task."""
    handed: asyncio.Queue[Callable[[], _Value | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(worker(lambda value: handed.put_nowait(lambda: value))) for _ in range(count)]
    for task in tasks:
        # The task's result is None for a player that has ended. For a failed player, ``result`` raises its exception.
        task.add_done_callback(lambda task: handed.put_nowait(task.result))
    running = count
    try:
        while running:
            value = (await handed.get())()
            if value is None:
                running -= 1
            else:
                yield value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _trace(last: Trajectory, began: int) -> None:
    """Add a span for a rollout to the trace, enclosing the spans of its turns."""
    ids = {"step": last.step, "group": last.group, "sample": last.sample}
    add_slice_since(began, f"{last.problem.id} {last.sample}", ended=str(last.ended), reward=last.reward, **ids)


def _messages(trajectory: Trajectory) -> tuple[Message, ...]:
    return tuple(
        Message(role=_ROLES[segment.origin], text=segment.text, reward=segment.reward)
        for segment in trajectory.segments
    )


def _played(group: Group, trajectories: list[Trajectory]) -> Group:
    """Return the group with its trajectories."""
    trajectories.sort(key=lambda item: (item.sample, item.branch))
    greedy = [item for item in trajectories if item.sample == group.size]
    return replace(
        group,
        trajectories=tuple(
            replace(item, problem_weight=group.problem_weight) for item in trajectories if item.sample < group.size
        ),
        greedy=concatenate_branches(greedy) if greedy else None,
    )
