"""The driver: plays episodes against an engine, each independently, and produces trajectories.

Only the driver handles both tokens and text. The ids that the engine sampled are the ids of the trajectory. An
observation is encoded once, separately, as plain text except for the marks that a protocol has set. Nothing is ever
decoded and then encoded again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Final, Literal

import stamina

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.admission import Admission
from agentrl.rollout.engines.base import Completion, Engine, Sampling
from agentrl.rollout.engines.sampling import sampling_key
from agentrl.rollout.gates import FairYield, Rounds
from agentrl.rollout.gateway.deployed import DeployedHistory
from agentrl.rollout.gateway.environment import AgentEnvironment
from agentrl.rollout.gateway.export import RolloutPlace
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.turn_loop import SampledTurn, TurnLoop, pooled
from agentrl.rollout.work_queue import RolloutRequest, SkippedProblemError
from agentrl.telemetry.trace import now, on_lane, since, span
from agentrl.trajectory import Group, Segment, Trajectory, one_after_another
from agentrl_envs.episode import Environment, Episode, UnavailableError
from agentrl_envs.protocols.marked_text import MarkedText
from agentrl_envs.rewards import Conversation, Message, Rewards
from agentrl_envs.types import Ended, Problem

logger = logging.getLogger(__name__)

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


Jobs = Callable[[], Awaitable[Job | None]]
"""Returns the next job when it may start, whichever player asks; None if there are no more."""
Measure = Callable[[RolloutRequest, int | None], None]
"""Receives the length of each prompt, or None for a rollout without one. Raises SkippedProblemError to replace it."""


def _unmeasured(request: RolloutRequest, tokens: int | None) -> None:
    """Accept a prompt of any length."""


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
    measure: Measure

    async def before_turn(self, request_id: str) -> None:
        """Return when the turn may be sampled."""
        if self.rounds is not None:
            await self.rounds.wait(request_id)


@dataclass(kw_only=True, slots=True)
class _TokenSampler:
    """The exact tokens of one trajectory: samples turns after them, and appends what was sampled and observed.

    ``keys`` identify the trajectory's randomness; ``sampling`` lacks the limit and the stop strings of a turn.
    """

    name: str
    keys: tuple[int, ...]
    sampling: Sampling
    engine: Engine
    codec: TextCodec
    encode_prompt: Callable[[str], tuple[int, ...]]
    measure: Callable[[int], None]
    running: _Running
    prompt_ids: tuple[int, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    context: tuple[int, ...] = ()
    turn: tuple[Completion, str] | None = None  # sampled and not yet credited

    @property
    def used(self) -> int:
        return len(self.context) - len(self.prompt_ids)

    def begin(self, prompt: str) -> None:
        self.prompt_ids = self.context = self.encode_prompt(prompt)
        self.measure(len(self.prompt_ids))

    async def sample(self, episode: Episode, limit: int) -> SampledTurn:
        """Sample one turn. If the engine stopped at a string that does not complete it, it continues from its ids."""
        turn = sum(segment.origin == "model" for segment in self.segments)
        merged: Completion | None = None
        part = 0
        while True:
            taken = len(merged.token_ids) if merged else 0
            piece = await self._piece(turn, part, replace(self.sampling, max_tokens=limit - taken, stop=episode.stop))
            self.context += piece.token_ids
            merged = piece if merged is None else _joined(merged, piece)
            text = self.codec.decode(merged.token_ids)
            part += 1
            at_limit = len(merged.token_ids) >= limit
            if piece.finish_reason != "stop" or at_limit or episode.turn_complete(text):
                self.turn = merged, text
                cut = piece.finish_reason == "length"
                return SampledTurn(text=text, cut=cut, full=at_limit and piece.finish_reason != "eos")

    async def _piece(self, turn: int, part: int, sampling: Sampling) -> Completion:
        request_id = f"{self.name}-{turn:04d}-{part:06d}"
        with span("wait for the others") if self.running.rounds is not None else nullcontext():
            await self.running.before_turn(request_id)
        seed = sampling_key(*self.keys, turn, part)
        piece = await self.engine.generate(
            self.context, sampling, trajectory_id=self.name, request_id=request_id, seed=seed
        )
        await self.running.fair_yield.wait()
        return piece

    def credit(self, reward: float) -> None:
        assert self.turn is not None
        completion, text = self.turn
        self.segments.append(
            Segment(
                origin="model",
                token_ids=completion.token_ids,
                text=text,
                log_probs=completion.log_probs,
                version_spans=completion.version_spans,
                reward=reward,
            )
        )

    def observe(self, text: str, most: int) -> bool:
        parts = self.codec.unsampled(text, self.context) if text else ()
        token_ids = self.codec.encode_parts(parts)
        fits = self.used + len(token_ids) <= most
        if token_ids and fits:
            self.segments.append(Segment(origin="observation", token_ids=token_ids, text=str(MarkedText(*parts))))
            self.context += token_ids
        return fits

    def close(self) -> None:
        self.engine.release(self.name)


@dataclass(kw_only=True)
class Driver:
    """Plays groups of trajectories, with one asyncio task per trajectory in flight and no barrier between turns.

    ``deterministic`` plays turns in rounds (:class:`~agentrl.rollout.gates.Rounds`), for bitwise reproducible runs.
    Randomness is keyed by ``seed``, step, problem, sample and turn. ``label`` distinguishes the trajectories from those
    of another driver on the same engine. ``rewards`` take the place of the environment's.
    """

    environment: Environment
    engine: Engine
    codec: TextCodec
    settings: RolloutSettings
    seed: int
    top_p: float = 1.0
    deterministic: bool = False
    label: str = ""
    rewards: Rewards | None = None
    last_failure: str | None = None
    """The reason for the last infrastructure failure that no episode reported."""

    def __post_init__(self) -> None:
        settings = self.settings
        self._admission = Admission(
            self.engine.cache_use,
            ceiling=settings.concurrency,
            longest=settings.max_prompt_tokens + settings.max_response_tokens,
            kv_high_watermark=settings.kv_high_watermark,
        )
        # The trajectories of a group start with the same prompt.
        self._encode_plain_prompt = lru_cache(maxsize=_PROMPTS)(self.codec.encode_prompt)

    def _encode_prompt(self, text: str) -> tuple[int, ...]:
        # Marked texts are not cached: two with the same characters may differ in their marks.
        return self.codec.encode_prompt(text) if isinstance(text, MarkedText) else self._encode_plain_prompt(text)

    def metrics(self) -> dict[str, float]:
        """Metrics of admission to the engine, and of the gateway if there is one, since the last call."""
        agents = self.environment.metrics() if isinstance(self.environment, AgentEnvironment) else {}
        return self._admission.metrics() | agents

    def check_crashes(self, groups: Sequence[Group], what: str) -> None:
        """Raise SettingsError if an agent program ended every rollout of ``groups`` with the same exception."""
        crashes = self.environment.crashes if isinstance(self.environment, AgentEnvironment) else {}
        if len(crashes) == 1 and all(item.no_data for group in groups for item in group.rollouts):
            (said,) = crashes.values()
            raise SettingsError(f"{what}: the agent program ended every rollout with the same error:\n{said}")

    async def prompt_tokens(self, problem: Problem) -> int:
        return len(await self.prompt(problem))

    async def prompt(self, problem: Problem) -> tuple[int, ...]:
        """The tokens of the problem's prompt. Raises UnavailableError if the environment does not start."""
        return await stamina.retry(
            on=UnavailableError, attempts=self.settings.retries + 1, timeout=None, wait_max=10.0
        )(self._started)(problem)

    async def _started(self, problem: Problem) -> tuple[int, ...]:
        seconds = self.settings.environment_deadline
        episode = self.environment.episode(problem)
        try:
            async with asyncio.timeout(seconds) as limit:
                return self._encode_prompt(await episode.start())
        except TimeoutError as error:
            if not limit.expired():
                raise  # not this deadline
            said = f"problem {problem.id}: the environment did not start within {seconds:g} s"
            raise UnavailableError(f"{said} (rollout.environment_deadline)") from error
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
    ) -> AsyncGenerator[Group, None]:
        """Yield groups of ``group_size`` trajectories, each as soon as its last trajectory has ended.

        ``greedy`` plays one more trajectory of each problem, at temperature 0.
        """
        samples = group_size + greedy
        listed = iter(
            [Job(request=request, sample=sample, step=step) for request in requests for sample in range(samples)]
        )

        async def jobs() -> Job | None:
            return next(listed, None)

        temperature = self.settings.temperature if temperature is None else temperature
        rollouts = len(requests) * samples
        return self._run(jobs, group_size, greedy=greedy, rollouts=rollouts, temperature=temperature)

    def run_jobs(
        self,
        jobs: Jobs,
        *,
        group_size: int,
        greedy: bool = False,
        measure: Measure = _unmeasured,
        rollouts: int | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Yield groups from jobs that arrive over time: all samples of a request, plus one if ``greedy``.

        ``rollouts``: how many jobs there are, if known. With ``deterministic`` their turns are then played in rounds.
        """
        temperature = self.settings.temperature
        return self._run(jobs, group_size, greedy=greedy, rollouts=rollouts, temperature=temperature, measure=measure)

    async def _run(
        self,
        jobs: Jobs,
        group_size: int,
        *,
        greedy: bool,
        rollouts: int | None,
        temperature: float,
        measure: Measure = _unmeasured,
    ) -> AsyncGenerator[Group, None]:
        """Assemble groups from finished trajectories."""
        greedy_sample = group_size if greedy else None
        players = self.settings.concurrency if rollouts is None else min(self.settings.concurrency, rollouts)
        running = _Running(
            temperature=temperature,
            greedy_sample=greedy_sample,
            rounds=Rounds(players) if self.deterministic and rollouts is not None else None,
            fair_yield=FairYield(),
            measure=measure,
        )
        parts: dict[int, list[Trajectory]] = {}
        # Exclude everything that exists by now (libraries, the model) from garbage collection while thousands of
        # trajectories are alive: collecting it causes the longest pauses of the event loop.
        gc.freeze()
        try:
            async with aclosing(pooled(players, partial(self._player, jobs, running))) as finished:
                async for trajectory in finished:
                    part = parts.setdefault(trajectory.group, [])
                    part.append(trajectory)
                    if sum(item.is_last_branch for item in part) == group_size + greedy:
                        yield _group(parts.pop(trajectory.group), greedy_sample)
        finally:
            gc.unfreeze()

    async def _player(self, jobs: Jobs, running: _Running, finished: Callable[[Trajectory], None]) -> None:
        try:
            while (job := await jobs()) is not None:
                with on_lane(f"{self.label}trajectories"):
                    began = now()
                    async with self._admission if running.rounds is None else nullcontext():
                        since(began, "wait for admission")
                        await running.fair_yield.wait()
                        job, branches = await self._measured(job, running)
                        self._admission.ended(sum(item.length for item in branches), branches[-1].seconds)
                        _trace(job, branches[-1], began)
                        for trajectory in branches:
                            finished(trajectory)
        finally:
            if running.rounds is not None:
                running.rounds.leave()

    async def _measured(self, job: Job, running: _Running) -> tuple[Job, tuple[Trajectory, ...]]:
        """Play one rollout, of the first problem whose prompt is not skipped."""
        while True:
            try:
                branches = await self._rollout(job, running)
            except SkippedProblemError as skipped:
                job = replace(job, request=skipped.replacement)
            else:
                running.measure(job.request, None)  # no effect unless the episode never started
                return job, branches

    async def _rollout(self, job: Job, running: _Running) -> tuple[Trajectory, ...]:
        """Play one rollout. After a failure outside the policy it restarts, a bounded number of times."""
        branches = await self._attempt(job, running)
        if branches[-1].ended is not Ended.INFRASTRUCTURE_FAILURE:
            return branches
        try:
            async for attempt in stamina.retry_context(
                on=_InfrastructureFailureError, attempts=self.settings.retries + 1, timeout=None, wait_max=10.0
            ):
                with attempt:
                    # The first attempt is over; only failures pay for the overhead of retrying.
                    if attempt.num > 1:
                        branches = await self._attempt(job, running)
                    if branches[-1].ended is Ended.INFRASTRUCTURE_FAILURE:
                        raise _InfrastructureFailureError(branches[-1])
        except _InfrastructureFailureError as failure:
            return (failure.trajectory,)
        return branches

    async def _attempt(self, job: Job, running: _Running) -> tuple[Trajectory, ...]:
        """The branches of one rollout: several only where an agent plays, or earlier turns are rendered anew."""
        if not isinstance(self.environment, AgentEnvironment | DeployedHistory):
            return (await self._conversation(job, running),)
        place = RolloutPlace(
            problem=job.request.problem,
            step=job.step,
            group=job.request.index,
            sample=job.sample,
            name=self._name(job),
            seed=self.seed,
            temperature=self._temperature(job, running),
            top_p=self.top_p,
        )
        measure = partial(running.measure, job.request)
        if isinstance(self.environment, DeployedHistory):
            branches, failure = await self.environment.play(
                place,
                engine=self.engine,
                settings=self.settings,
                gate=running.before_turn,
                fair_yield=running.fair_yield,
                measure=measure,
            )
        else:
            measure(len(self._encode_prompt(await self.environment.episode(place.problem).start())))
            branches, failure = await self.environment.play(
                place,
                engine=self.engine,
                settings=self.settings,
                gate=running.before_turn,
                rewarded_later=self.rewards is not None,
            )
        self.last_failure = failure or self.last_failure
        last = await self._rewarded(branches[-1], running, earlier=branches[:-1])
        if last.no_data:
            return (last.alone(),)
        return (*(replace(item, reward_elsewhere=last.reward) for item in branches[:-1]), last)

    def _name(self, job: Job) -> str:
        # Zero-padded, so that names sort in the order of requests, samples and turns.
        return f"{self.label}{job.step:08d}-{job.request.index:012d}-{job.sample:06d}"

    def _temperature(self, job: Job, running: _Running) -> float:
        return 0.0 if job.sample == running.greedy_sample else running.temperature

    async def _conversation(self, job: Job, running: _Running) -> Trajectory:
        loop = asyncio.get_running_loop()
        began = loop.time()
        sampler = _TokenSampler(
            name=self._name(job),
            keys=(self.seed, job.step, job.request.index, job.sample),
            sampling=Sampling(
                max_tokens=self.settings.max_turn_tokens,
                temperature=self._temperature(job, running),
                top_p=self.top_p,
            ),
            engine=self.engine,
            codec=self.codec,
            encode_prompt=self._encode_prompt,
            measure=partial(running.measure, job.request),
            running=running,
        )
        problem = job.request.problem
        turns = TurnLoop(problem=problem, sampler=sampler, settings=self.settings, fair_yield=running.fair_yield)
        ended = await turns.play(self.environment)
        self.last_failure = turns.failure or self.last_failure
        trajectory = Trajectory(
            problem=problem,
            step=job.step,
            group=job.request.index,
            sample=job.sample,
            prompt_ids=sampler.prompt_ids,
            segments=tuple(sampler.segments),
            ended=ended,
            verdict=turns.verdict,
            answer=turns.answer,
            tool_calls=tuple(turns.calls),
            seconds=loop.time() - began,
        )
        return await self._rewarded(trajectory, running)

    async def _rewarded(
        self, trajectory: Trajectory, running: _Running, *, earlier: Sequence[Trajectory] = ()
    ) -> Trajectory:
        """The trajectory with the rewards of ``reward.functions``, if set; no data if those do not answer.

        ``earlier``: the other sequences of its rollout.
        """
        if self.rewards is None or trajectory.no_data:
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


def _trace(job: Job, last: Trajectory, began: int) -> None:
    """The slice of a rollout, on its lane, around those of its turns."""
    place = {"step": job.step, "group": job.request.index, "sample": job.sample}
    since(began, f"{job.request.problem.id} {job.sample}", ended=str(last.ended), reward=last.reward, **place)


def _messages(trajectory: Trajectory) -> tuple[Message, ...]:
    return tuple(
        Message(role=_ROLES[segment.origin], text=segment.text, reward=segment.reward)
        for segment in trajectory.segments
    )


def _group(trajectories: list[Trajectory], greedy_sample: int | None) -> Group:
    trajectories.sort(key=lambda item: (item.sample, item.branch))
    greedy = [item for item in trajectories if item.sample == greedy_sample]
    return Group(
        problem=trajectories[0].problem,
        index=trajectories[0].group,
        trajectories=tuple(item for item in trajectories if item.sample != greedy_sample),
        greedy=one_after_another(greedy) if greedy else None,
    )


def _joined(first: Completion, second: Completion) -> Completion:
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        log_probs=first.log_probs + second.log_probs,
        version_spans=first.version_spans + second.version_spans,
    )
