"""Sampling of rollouts: with a token engine through the driver of training, or with a text endpoint.

Players do not retry. Their caller decides whether to repeat rollouts that failed for reasons outside the policy.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.evaluation.play.text_engine import ContextFullError, TextEngine, TextSampling
from agentrl.evaluation.records.transcript import Sample, Transcript, Turn
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver, pooled
from agentrl.rollout.engines.base import Engine
from agentrl.rollout.engines.sampling import sampling_key
from agentrl.rollout.policy import FairYield, TurnPolicy
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import RolloutRequest
from agentrl.trajectory import one_after_another
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Ended


class Player(Protocol):
    """Plays samples concurrently, in no particular order."""

    def play(self, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]: ...


@dataclass(frozen=True, kw_only=True)
class TokenPlayer:
    """Samples with the driver of training. Each sample is a separate group, returned when its conversation ends.

    Randomness depends on the seed, the benchmark, the problem's id, the sample's number and the attempt. Adding samples
    or benchmarks therefore changes no existing rollout.
    """

    environment: Environment
    engine: Engine
    codec: TextCodec
    settings: RolloutSettings
    top_p: float
    seed: int

    async def play(self, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]:
        driver = Driver(
            environment=self.environment,
            engine=self.engine,
            codec=self.codec,
            settings=self.settings.model_copy(update={"retries": 0}),
            seed=self.seed,
            top_p=self.top_p,
        )
        by_index = {_index(sample): sample for sample in samples}
        if len(by_index) < len(samples):
            raise AssertionError("two samples have the same index: a sample was requested twice")
        requests = [RolloutRequest(index=index, problem=sample.problem) for index, sample in by_index.items()]
        async with aclosing(driver.run(requests, step=0, group_size=1)) as groups:
            async for group in groups:
                trajectory = one_after_another(group.trajectories)
                failure = driver.last_failure if trajectory.ended is Ended.INFRASTRUCTURE_FAILURE else None
                yield Transcript.of(by_index[group.index], trajectory, failure=failure)


@dataclass(frozen=True, kw_only=True)
class TextPlayer:
    """Runs up to ``concurrency`` conversations with an endpoint. Token counts are as exact as the endpoint's."""

    environment: Environment
    engine: TextEngine
    settings: RolloutSettings
    top_p: float
    seed: int
    concurrency: int

    async def play(self, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]:
        work = iter(samples)
        fair_yield = FairYield()

        async def player(finished: Callable[[Transcript], None]) -> None:
            for sample in work:
                finished(await self._transcript(sample, fair_yield))

        async with aclosing(pooled(min(self.concurrency, len(samples)), player)) as played:
            async for transcript in played:
                yield transcript

    async def _transcript(self, sample: Sample, fair_yield: FairYield) -> Transcript:
        policy = _TextPolicy(
            problem=sample.problem,
            settings=self.settings,
            fair_yield=fair_yield,
            sample_of=sample,
            engine=self.engine,
            keys=(self.seed, sample.benchmark, sample.problem.id, sample.number, sample.attempt),
            top_p=self.top_p,
        )
        return await policy.play(self.environment)


@dataclass(kw_only=True, eq=False)
class _TextPolicy(TurnPolicy[Transcript]):
    """A conversation as text. ``conversation`` alternates between texts for the model and its turns."""

    sample_of: Sample
    engine: TextEngine
    keys: tuple[int | str, ...]
    top_p: float
    conversation: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt_tokens: int = 0
    reward: float = 0.0
    refused: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def used(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    def begin(self, prompt: str) -> None:
        self.conversation.append(prompt)

    async def _sample(self, episode: Episode, limit: int) -> str | None:
        turn = sum(item.origin == "model" for item in self.turns)
        sampling = TextSampling(
            max_tokens=limit,
            temperature=self.settings.temperature,
            top_p=self.top_p,
            seed=sampling_key(*self.keys, turn) >> 33,  # 31 bits, which every endpoint accepts
            stop=episode.stop,
            complete=episode.turn_complete,
        )
        try:
            completion = await self.engine.generate(self.conversation, sampling)
        except ContextFullError:
            if not turn:
                raise
            return None
        self.conversation.append(completion.text)
        self.refused |= completion.finish_reason == "refused"
        self.turns.append(
            Turn(origin="model", text=completion.text, tokens=completion.tokens, reasoning=completion.reasoning)
        )
        if not turn:
            self.prompt_tokens = completion.prompt_tokens or 0
        self.cut = self.full = completion.finish_reason == "length"
        return completion.text

    def _credit(self, reward: float) -> None:
        self.reward += reward

    def _append(self, observation: str, most: int) -> bool:
        """Append an observation of any length. Its tokens are estimated as characters / 4."""
        self.conversation.append(observation)
        if observation:
            self.turns.append(Turn(origin="observation", text=observation, tokens=-(-len(observation) // 4)))
        return True

    def end(self, ended: Ended) -> Transcript:
        return Transcript(
            benchmark=self.sample_of.benchmark,
            problem=self.problem.id,
            sample=self.sample_of.number,
            attempt=self.sample_of.attempt,
            turns=tuple(self.turns),
            ended=ended,
            prompt_tokens=self.prompt_tokens,
            verdict=self.verdict,
            answer=self.answer,
            reward=self.reward,
            tool_calls=tuple(self.calls),
            seconds=time.monotonic() - self.began,
            failure=self.failure,
            refused=self.refused,
        )


def _index(sample: Sample) -> int:
    """Number of a sample for the driver: 63 bits of a hash, which depend on nothing else."""
    name = f"{sample.benchmark}\0{sample.problem.id}\0{sample.number}\0{sample.attempt}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
