"""Play rollouts: with a token engine through the driver used in training, or with a text endpoint.

A player yields each transcript as soon as its conversation has ended. It does not retry: rollouts that failed for
reasons outside the policy are returned as such, and the caller decides whether to play them again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from agentrl.evaluation.play.text_engine import ContextFullError, TextEngine, TextSampling
from agentrl.evaluation.records.transcript import Sample, Transcript, Turn
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver, NoAnswerError, answer_of, spent
from agentrl.rollout.engines.base import CacheUse, Completion, Engine, EngineError, Sampling
from agentrl.rollout.engines.sampling import sampling_key
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import RolloutRequest
from agentrl.trajectory import Group
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Ended, Step, ToolCall, Verdict


class Player(Protocol):
    """Plays samples concurrently, in no particular order."""

    def play(self, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]: ...


class TokenPlayer:
    """The driver of training, with one group per sample, so that each is returned when its own conversation ends.

    Randomness is keyed by the seed, the benchmark, the problem's id, the sample's number and the attempt, so adding
    samples or benchmarks changes no existing rollout.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        engine: Engine,
        codec: TextCodec,
        settings: RolloutSettings,
        top_p: float,
        seed: int,
    ) -> None:
        self._engine = NucleusEngine(engine, top_p)
        self._driver = Driver(
            environment=environment,
            engine=self._engine,
            codec=codec,
            settings=settings.model_copy(update={"retries": 0}),
            seed=seed,
        )

    async def play(self, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]:
        """Play every sample once."""
        by_index = {_index(sample): sample for sample in samples}
        if len(by_index) < len(samples):
            raise AssertionError("two samples have one index: a sample was asked for twice")
        requests = [RolloutRequest(index=index, problem=sample.problem) for index, sample in by_index.items()]
        played = cast("AsyncGenerator[Group, None]", self._driver.run(requests, step=0, group_size=1))
        async with aclosing(played) as groups:
            async for group in groups:
                (trajectory,) = group.trajectories
                failure = self._engine.last_failure if trajectory.ended is Ended.INFRASTRUCTURE_FAILURE else None
                yield Transcript.of(by_index[group.index], trajectory, failure=failure)


class NucleusEngine:
    """An engine that samples with ``top_p`` and remembers the reason for its last failure."""

    def __init__(self, engine: Engine, top_p: float) -> None:
        self._engine = engine
        self._top_p = top_p
        self.last_failure: str | None = None

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        try:
            return await self._engine.generate(
                token_ids,
                replace(sampling, top_p=self._top_p),
                trajectory_id=trajectory_id,
                request_id=request_id,
                seed=seed,
            )
        except EngineError as error:
            self.last_failure = str(error)
            raise

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        return await self._engine.score(token_ids)

    async def cache_use(self) -> CacheUse | None:
        return await self._engine.cache_use()

    def fingerprint(self) -> str:
        return self._engine.fingerprint()

    async def health(self) -> str:
        return await self._engine.health()

    async def close(self) -> None:
        """Do nothing: the owner of the wrapped engine closes it."""


class TextPlayer:
    """Up to ``concurrency`` conversations with an endpoint. Token limits are as exact as the endpoint's counts."""

    def __init__(
        self,
        *,
        environment: Environment,
        engine: TextEngine,
        settings: RolloutSettings,
        top_p: float,
        seed: int,
        concurrency: int,
    ) -> None:
        self._environment = environment
        self._engine = engine
        self._settings = settings
        self._top_p = top_p
        self._seed = seed
        self._concurrency = concurrency

    async def play(self, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]:
        """Play every sample once."""
        async with aclosing(_pooled(samples, self._conversation, self._concurrency)) as played:
            async for transcript in played:
                yield transcript

    async def _conversation(self, sample: Sample) -> Transcript:
        loop = asyncio.get_running_loop()
        began = loop.time()
        draft = _TextDraft(sample=sample)
        episode = self._environment.episode(sample.problem)
        try:
            ended = await self._converse(draft, episode)
        except (EngineError, NoAnswerError) as error:
            ended, draft.failure = Ended.INFRASTRUCTURE_FAILURE, str(error)
        finally:
            await episode.close()
        return draft.finish(ended, loop.time() - began)

    async def _converse(self, draft: _TextDraft, episode: Episode) -> Ended:
        draft.conversation.append(await answer_of(episode.start(), self._settings))
        while True:
            room = self._settings.max_response_tokens - draft.tokens
            limit = min(self._settings.max_turn_tokens, room)
            try:
                reason = await self._turn(draft, episode, limit)
            except ContextFullError:
                return Ended.TOKEN_LIMIT if draft.turns else Ended.INFRASTRUCTURE_FAILURE
            step = await answer_of(episode.step(draft.conversation[-1]), self._settings)
            draft.take(step)
            if step.ended is not None:
                full = reason == "length" and limit == room and step.ended is Ended.VOID_TURN
                cut = reason == "length" and step.ended is Ended.STOPPED
                return Ended.TOKEN_LIMIT if full or cut else step.ended
            if draft.tokens >= self._settings.max_response_tokens:
                return Ended.TOKEN_LIMIT
            if spent(draft.calls, self._settings):
                return Ended.DEADLINE

    async def _turn(self, draft: _TextDraft, episode: Episode, limit: int) -> str:
        sample = draft.sample
        turn = sum(item.origin == "model" for item in draft.turns)
        key = sampling_key(self._seed, sample.benchmark, sample.problem.id, sample.number, sample.attempt, turn)
        completion = await self._engine.generate(
            draft.conversation,
            TextSampling(
                max_tokens=limit,
                temperature=self._settings.temperature,
                top_p=self._top_p,
                seed=key >> 33,  # 31 bits, which every endpoint accepts
                stop=episode.stop,
                complete=episode.turn_complete,
            ),
        )
        draft.conversation.append(completion.text)
        draft.refused |= completion.finish_reason == "refused"
        draft.turns.append(
            Turn(origin="model", text=completion.text, tokens=completion.tokens, reasoning=completion.reasoning)
        )
        if turn == 0:
            draft.prompt_tokens = completion.prompt_tokens or 0
        return completion.finish_reason


@dataclass(slots=True)
class _TextDraft:
    """A conversation in progress; ``conversation`` alternates between text shown to the model and its turns."""

    sample: Sample
    conversation: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    prompt_tokens: int = 0
    reward: float = 0.0
    verdict: Verdict | None = None
    answer: str | None = None
    failure: str | None = None
    refused: bool = False

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    def take(self, step: Step) -> None:
        """Record the episode's reply to the last turn. Tokens of observations are estimated as characters / 4."""
        self.reward += 0.0 if step.ended is not None and step.ended.is_no_data else step.reward
        self.calls.extend(step.tool_calls)
        self.verdict, self.answer = step.verdict, step.answer
        self.conversation.append(step.observation)
        if step.observation:
            guess = -(-len(step.observation) // 4)
            self.turns.append(Turn(origin="observation", text=step.observation, tokens=guess))

    def finish(self, ended: Ended, seconds: float) -> Transcript:
        return Transcript(
            benchmark=self.sample.benchmark,
            problem=self.sample.problem.id,
            sample=self.sample.number,
            attempt=self.sample.attempt,
            turns=tuple(self.turns),
            ended=ended,
            prompt_tokens=self.prompt_tokens,
            verdict=self.verdict,
            answer=self.answer,
            reward=self.reward,
            tool_calls=tuple(self.calls),
            seconds=seconds,
            failure=self.failure if ended is Ended.INFRASTRUCTURE_FAILURE else None,
            refused=self.refused,
        )


async def _pooled(
    samples: Sequence[Sample], play: Callable[[Sample], Awaitable[Transcript]], concurrency: int
) -> AsyncGenerator[Transcript, None]:
    """The results of ``play`` as they complete, at most ``concurrency`` at once. Exceptions of any call propagate."""
    work = iter(samples)
    finished: asyncio.Queue[Transcript | asyncio.Task[None]] = asyncio.Queue()

    async def player() -> None:
        for sample in work:
            finished.put_nowait(await play(sample))

    tasks = [asyncio.create_task(player()) for _ in range(min(concurrency, len(samples)))]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    try:
        for _ in samples:
            while isinstance(item := await finished.get(), asyncio.Task):
                item.result()
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _index(sample: Sample) -> int:
    """A number for the driver that depends only on the sample: 63 bits of a hash."""
    name = f"{sample.benchmark}\0{sample.problem.id}\0{sample.number}\0{sample.attempt}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
