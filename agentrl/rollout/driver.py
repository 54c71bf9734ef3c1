"""The driver: plays episodes against an engine, each independently, and produces trajectories.

Only the driver handles both tokens and text. The ids that the engine sampled are the ids of the trajectory. An
observation is encoded once, separately, as plain text except for the marks that a protocol has set. Nothing is ever
decoded and then encoded again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal, Protocol, TypeVar

import stamina

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.admission import Admission
from agentrl.rollout.engines.base import Completion, Engine, EngineError, Sampling
from agentrl.rollout.engines.sampling import sampling_key
from agentrl.rollout.gates import FairYield, Rounds
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import RolloutRequest
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.protocols.marked_text import MarkedText
from agentrl_envs.rewards import Conversation, Message, Reward
from agentrl_envs.types import Ended, Problem, Step, ToolCall, Verdict

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Number of encoded prompts to cache.
_PROMPTS = 512
# The role by which users' rewards know the origin of a segment.
_ROLES: Final[dict[Literal["model", "observation"], Literal["assistant", "tool"]]] = {
    "model": "assistant",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One trajectory to play. ``step`` is the training step it was issued for."""

    request: RolloutRequest
    sample: int
    step: int


class Jobs(Protocol):
    """The source of trajectories to play, shared by all players."""

    async def next(self) -> Job | None:
        """Return the next job when it may start; None if there are no more."""


class _Listed:
    """Every sample of a list of problems, at once."""

    def __init__(self, requests: Sequence[RolloutRequest], *, samples: int, step: int) -> None:
        self._jobs = iter(
            [Job(request=request, sample=sample, step=step) for request in requests for sample in range(samples)]
        )

    async def next(self) -> Job | None:
        return next(self._jobs, None)


class NoAnswerError(Exception):
    """An environment has not answered in time, so the trajectory is no evidence about the policy."""


async def answer_of(environment: Awaitable[_Answer], settings: RolloutSettings) -> _Answer:
    """Return an environment's answer to a start or a turn. Raises NoAnswerError past ``environment_deadline``."""
    try:
        async with asyncio.timeout(settings.environment_deadline) as limit:
            return await environment
    except TimeoutError:
        if not limit.expired():
            raise  # not this deadline
        said = f"the environment gave no answer within {settings.environment_deadline:g} s"
        raise NoAnswerError(f"{said} (rollout.environment_deadline)") from None


def spent(calls: Sequence[ToolCall], settings: RolloutSettings) -> bool:
    """Whether a trajectory's programs and tools have run longer than ``rollout.program_seconds``."""
    return settings.program_seconds is not None and sum(call.seconds for call in calls) > settings.program_seconds


class _InfrastructureFailureError(Exception):
    """Carries a trajectory that failed outside the policy to the surrounding retry."""

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__(f"problem {trajectory.problem.id}: infrastructure failure")
        self.trajectory = trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """The state shared by all trajectories of one call of :meth:`Driver.run`."""

    temperature: float
    greedy_sample: int | None  # the index of the sample played at temperature 0
    rounds: Rounds | None
    fair_yield: FairYield

    def temperature_of(self, sample: int) -> float:
        return 0.0 if sample == self.greedy_sample else self.temperature


@dataclass(slots=True)
class _Draft:
    """A trajectory while it is being played."""

    job: Job
    name: str
    prompt_ids: tuple[int, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    context: tuple[int, ...] = ()
    calls: list[ToolCall] = field(default_factory=list)
    verdict: Verdict | None = None
    answer: str | None = None

    @property
    def used(self) -> int:
        return len(self.context) - len(self.prompt_ids)

    def observe(self, text: str, token_ids: tuple[int, ...]) -> None:
        self.segments.append(Segment(origin="observation", token_ids=token_ids, text=text))
        self.context += token_ids

    def finish(self, ended: Ended, seconds: float) -> Trajectory:
        return Trajectory(
            problem=self.job.request.problem,
            step=self.job.step,
            group=self.job.request.index,
            sample=self.job.sample,
            prompt_ids=self.prompt_ids,
            segments=tuple(self.segments),
            ended=ended,
            verdict=self.verdict,
            answer=self.answer,
            tool_calls=tuple(self.calls),
            seconds=seconds,
        )


class Driver:
    """Plays groups of trajectories, with one asyncio task per trajectory in flight and no barrier between turns.

    ``deterministic`` plays turns in rounds (:class:`~agentrl.rollout.gates.Rounds`), for bitwise reproducible runs.
    Randomness is keyed by ``seed``, step, problem, sample and turn.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        engine: Engine,
        codec: TextCodec,
        settings: RolloutSettings,
        seed: int,
        deterministic: bool = False,
        label: str = "",
        reward: Reward | None = None,
    ) -> None:
        """``label`` distinguishes this driver's trajectories from those of another driver on the same engine.

        ``reward`` replaces the environment's rewards, on a trajectory's last model token.
        """
        self._reward = reward
        self._environment = environment
        self._engine = engine
        self._codec = codec
        self._settings = settings
        self._seed = seed
        self._deterministic = deterministic
        self._label = label
        self._admission = Admission(
            engine.cache_use,
            ceiling=settings.concurrency,
            longest=settings.max_prompt_tokens + settings.max_response_tokens,
            kv_high_watermark=settings.kv_high_watermark,
        )
        # The trajectories of a group start with the same prompt.
        self._encode_plain_prompt = lru_cache(maxsize=_PROMPTS)(codec.encode_prompt)

    def _encode_prompt(self, text: str) -> tuple[int, ...]:
        # Marked texts are not cached: two with the same characters may differ in their marks.
        return self._codec.encode_prompt(text) if isinstance(text, MarkedText) else self._encode_plain_prompt(text)

    def metrics(self) -> dict[str, float]:
        """Metrics of admission to the engine since the last call."""
        return self._admission.metrics()

    async def prompt_tokens(self, problem: Problem) -> int:
        """The length of a problem's prompt in tokens."""
        return len(await self.prompt(problem))

    async def prompt(self, problem: Problem) -> tuple[int, ...]:
        """A problem's prompt in tokens."""
        episode = self._environment.episode(problem)
        try:
            return self._encode_prompt(await episode.start())
        finally:
            await episode.close()

    def run(
        self,
        requests: Sequence[RolloutRequest],
        *,
        step: int,
        group_size: int,
        temperature: float | None = None,
        greedy: bool = False,
    ) -> AsyncGenerator[Group]:
        """Yield groups of ``group_size`` trajectories, each as soon as its last trajectory has ended.

        ``greedy`` plays one more trajectory of each problem, at temperature 0.
        """
        samples = group_size + int(greedy)
        players = min(self._settings.concurrency, len(requests) * samples)
        running = _Running(
            temperature=self._settings.temperature if temperature is None else temperature,
            greedy_sample=group_size if greedy else None,
            rounds=Rounds(players) if self._deterministic else None,
            fair_yield=FairYield(),
        )
        jobs = _Listed(requests, samples=samples, step=step)
        return self._run(jobs, running, players=players, samples=samples, groups=len(requests))

    def run_jobs(self, jobs: Jobs, *, group_size: int, greedy: bool = False) -> AsyncGenerator[Group]:
        """Yield groups endlessly from jobs that arrive over time: all samples of a request, plus one if ``greedy``."""
        running = _Running(
            temperature=self._settings.temperature,
            greedy_sample=group_size if greedy else None,
            rounds=None,
            fair_yield=FairYield(),
        )
        samples = group_size + int(greedy)
        return self._run(jobs, running, players=self._settings.concurrency, samples=samples, groups=None)

    async def _run(
        self, jobs: Jobs, running: _Running, *, players: int, samples: int, groups: int | None
    ) -> AsyncGenerator[Group]:
        finished: asyncio.Queue[Trajectory | asyncio.Task[None]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._player(jobs, running, finished)) for _ in range(players)]
        for task in tasks:
            task.add_done_callback(finished.put_nowait)
        # Exclude everything that exists by now (libraries, the model) from garbage collection while thousands of
        # trajectories are alive: collecting it causes the longest pauses of the event loop.
        gc.freeze()
        try:
            async for group in self._grouped(finished, samples, running.greedy_sample, groups):
                yield group
        finally:
            gc.unfreeze()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _grouped(
        self,
        finished: asyncio.Queue[Trajectory | asyncio.Task[None]],
        samples: int,
        greedy_sample: int | None,
        groups: int | None,
    ) -> AsyncGenerator[Group]:
        """Assemble groups from finished trajectories. A crashed player arrives as its task and raises here."""
        parts: dict[int, list[Trajectory]] = {}
        whole = 0
        while whole != groups:
            trajectory = await finished.get()
            if isinstance(trajectory, asyncio.Task):
                trajectory.result()
                continue
            part = parts.setdefault(trajectory.group, [])
            part.append(trajectory)
            if len(part) == samples:
                del parts[trajectory.group]
                whole += 1
                part.sort(key=lambda item: item.sample)
                yield Group(
                    problem=trajectory.problem,
                    index=trajectory.group,
                    trajectories=tuple(item for item in part if item.sample != greedy_sample),
                    greedy=next((item for item in part if item.sample == greedy_sample), None),
                )

    async def _player(
        self,
        jobs: Jobs,
        running: _Running,
        finished: asyncio.Queue[Trajectory | asyncio.Task[None]],
    ) -> None:
        try:
            while (job := await jobs.next()) is not None:
                async with self._admission if running.rounds is None else nullcontext():
                    await running.fair_yield.wait()
                    trajectory = await self._trajectory(job, running)
                    self._admission.ended(trajectory.length, trajectory.seconds)
                    finished.put_nowait(trajectory)
        finally:
            if running.rounds is not None:
                running.rounds.leave()

    async def _trajectory(self, job: Job, running: _Running) -> Trajectory:
        """Play one trajectory. After a failure outside the policy it restarts, a bounded number of times."""
        trajectory = await self._attempt(job, running)
        if trajectory.ended is not Ended.INFRASTRUCTURE_FAILURE:
            return trajectory
        try:
            async for attempt in stamina.retry_context(
                on=_InfrastructureFailureError, attempts=self._settings.retries + 1, timeout=None, wait_max=10.0
            ):
                with attempt:
                    # The first attempt is over; only failures pay for the overhead of retrying.
                    if attempt.num > 1:
                        trajectory = await self._attempt(job, running)
                    if trajectory.ended is Ended.INFRASTRUCTURE_FAILURE:
                        raise _InfrastructureFailureError(trajectory)
        except _InfrastructureFailureError as failure:
            return failure.trajectory
        return trajectory

    async def _attempt(self, job: Job, running: _Running) -> Trajectory:
        loop = asyncio.get_running_loop()
        began = loop.time()
        # Zero-padded, so that names sort in the order of requests, samples and turns.
        name = f"{self._label}{job.step:08d}-{job.request.index:012d}-{job.sample:06d}"
        draft = _Draft(job=job, name=name)
        episode = self._environment.episode(job.request.problem)
        try:
            ended = await self._converse(draft, episode, running)
        except EngineError:
            ended = Ended.INFRASTRUCTURE_FAILURE
        except NoAnswerError as error:
            logger.warning("problem %s: %s", job.request.problem.id, error)
            ended = Ended.INFRASTRUCTURE_FAILURE
        finally:
            self._engine.release(draft.name)
            await episode.close()
        return await self._rewarded(draft.finish(ended, loop.time() - began), running)

    async def _rewarded(self, trajectory: Trajectory, running: _Running) -> Trajectory:
        """The trajectory with the reward of ``reward.function``, if set; excluded from the data if that times out."""
        if self._reward is None or trajectory.no_data:
            return trajectory
        turns = tuple(Message(role=_ROLES[segment.origin], text=segment.text) for segment in trajectory.segments)
        conversation = Conversation(
            turns=turns, ended=trajectory.ended, answer=trajectory.answer, environment_reward=trajectory.reward
        )
        try:
            value = await self._reward(trajectory.problem, conversation, trajectory.verdict)
        except TimeoutError as error:
            logger.warning("problem %s: %s", trajectory.problem.id, error)
            return replace(trajectory, ended=Ended.INFRASTRUCTURE_FAILURE)
        await running.fair_yield.wait()
        return trajectory.with_reward(value)

    async def _converse(self, draft: _Draft, episode: Episode, running: _Running) -> Ended:
        draft.prompt_ids = draft.context = self._encode_prompt(await answer_of(episode.start(), self._settings))
        while True:
            completion, text, full = await self._turn(draft, episode, running)
            step = await answer_of(episode.step(text), self._settings)
            await running.fair_yield.wait()
            reward = 0.0 if step.ended is not None and step.ended.is_no_data else step.reward
            draft.segments.append(
                Segment(
                    origin="model",
                    token_ids=completion.token_ids,
                    text=text,
                    log_probs=completion.log_probs,
                    version_spans=completion.version_spans,
                    reward=reward,
                )
            )
            draft.calls.extend(step.tool_calls)
            draft.verdict, draft.answer = step.verdict, step.answer
            ended = self._observe(draft, step, full=full, cut=completion.finish_reason == "length")
            if ended is not None:
                return ended

    def _observe(self, draft: _Draft, step: Step, *, full: bool, cut: bool) -> Ended | None:
        """Append the observation. Returns how the trajectory ended, or None if it continues.

        ``full``: the total token limit cut the turn; ``cut``: the total limit or the turn's own limit cut it.
        """
        parts = self._codec.unsampled(step.observation, draft.context) if step.observation else ()
        observed = self._codec.encode_parts(parts)
        fits = draft.used + len(observed) <= self._settings.max_response_tokens
        if observed and fits:
            draft.observe(str(MarkedText(*parts)), observed)
        if step.ended is not None:
            limited = (full and step.ended is Ended.VOID_TURN) or ((full or cut) and step.ended is Ended.STOPPED)
            return Ended.TOKEN_LIMIT if limited else step.ended
        if not fits or draft.used >= self._settings.max_response_tokens:
            return Ended.TOKEN_LIMIT
        return Ended.DEADLINE if spent(draft.calls, self._settings) else None

    async def _turn(self, draft: _Draft, episode: Episode, running: _Running) -> tuple[Completion, str, bool]:
        """Sample one turn: its tokens, its text, and whether the trajectory's token limit cut it.

        If the engine stopped at a string that does not complete the turn, the same turn continues from the exact ids.
        """
        job = draft.job
        turn = sum(segment.origin == "model" for segment in draft.segments)
        room = self._settings.max_response_tokens - draft.used
        limit = min(self._settings.max_turn_tokens, room)
        merged: Completion | None = None
        part = 0
        while True:
            request_id = f"{draft.name}-{turn:04d}-{part:06d}"
            if running.rounds is not None:
                await running.rounds.wait(request_id)
            taken = len(merged.token_ids) if merged else 0
            piece = await self._engine.generate(
                draft.context,
                Sampling(
                    max_tokens=limit - taken, stop=episode.stop, temperature=running.temperature_of(draft.job.sample)
                ),
                trajectory_id=draft.name,
                request_id=request_id,
                seed=sampling_key(self._seed, job.step, job.request.index, job.sample, turn, part),
            )
            await running.fair_yield.wait()
            draft.context += piece.token_ids
            merged = piece if merged is None else _joined(merged, piece)
            text = self._codec.decode(merged.token_ids)
            part += 1
            taken = len(merged.token_ids)
            if piece.finish_reason != "stop" or taken >= limit or episode.turn_complete(text):
                return merged, text, taken >= room and piece.finish_reason != "eos"


def _joined(first: Completion, second: Completion) -> Completion:
    """Join two parts of one turn into one completion."""
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        log_probs=first.log_probs + second.log_probs,
        version_spans=first.version_spans + second.version_spans,
    )
