"""Samplers of an evaluation: a local model, whose weights are verified, or an endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.endpoint import ContextFullError, TextEngine, TextSampling
from agentrl.evaluation.provenance import build_configured_engine_record
from agentrl.evaluation.settings import EvaluationSections
from agentrl.evaluation.transcripts import Sample, Transcript, Turn
from agentrl.models.loading import model_fingerprint, read_model, read_model_config_if_available
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.driver import Driver, yield_from_tasks
from agentrl.rollout.engines.base import Engine, EngineSpecification, ManagedEngine, engine_facts, engine_plugin
from agentrl.rollout.engines.sampling import sampling_key
from agentrl.rollout.environment import build_chat_setup, build_codec, build_environment, uses_chat_template
from agentrl.rollout.policy import EventLoopThrottle, TurnPolicy
from agentrl.rollout.settings import longest_request_tokens
from agentrl.trajectory import Group, concatenate_branches
from agentrl.weights.verify import Probe, add_tied_head, checksums
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Ended

# Text that both the servers and this process score. It resembles evaluation text, but is not from a benchmark.
PROBE = """A farmer has 12 boxes with 25 apples each. He sells 30 % of all apples and gives a quarter of the rest away.
How many apples are left? First there are 12 * 25 = 300 apples. After the sale 300 * (1 - 0.3) = 210 remain, and after
the gift 210 * 3 / 4 = 157.5, so the story cannot be about whole apples. Let $f(x) = x^2 - 4x + 1$; then
$f(x) = (x - 2)^2 - 3$ has its minimum $-3$ at $x = 2$.
```python
print(min(x * x - 4 * x + 1 for x in range(-10, 11)))
```
-3
"""


async def open_and_verify_engine(managed: ManagedEngine, settings: EvaluationSections, codec: TextCodec) -> str:
    """Open the engine, verify its weights and return the fingerprint of the model in ``model.path``.

    While the servers start, this process loads the model on the CPU. Every server must have the same weight checksums
    and return the same scores for the probe. Raises SettingsError for settings or a model that the engine does not
    support, and WorldError if a server fails or its weights differ.
    """
    try:
        reading = asyncio.to_thread(_compute_fingerprint_and_probe, settings, codec)
        (fingerprint, probe), _ = await asyncio.gather(reading, managed.open())
        problem = await managed.verify(0, probe)
        if problem is not None:
            raise WorldError(f"{problem}, although the server was started with this model")
    except BaseException:
        await managed.close()
        raise
    return fingerprint


@torch.inference_mode()
def _compute_fingerprint_and_probe(settings: EvaluationSections, codec: TextCodec) -> tuple[str, Probe]:
    """Load the model, and return its fingerprint and its scores of the probe."""
    policy = settings.model.model_copy(update={"attention": "sdpa"})
    model = read_model(str(settings.model.path), policy).eval()
    token_ids = codec.encode(PROBE)[: settings.rollout.max_prompt_tokens]
    ids = torch.tensor([token_ids])
    log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    scores = tuple(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    probe = Probe(token_ids=token_ids, log_probs=scores, checksums=add_tied_head(checksums(model.named_parameters())))
    return model_fingerprint(model.state_dict().items()), probe


ProblemKey = tuple[str, str]
"""Name of a benchmark, and id of a problem in it."""


class Sampler(Protocol):
    """Samples the rollouts of an evaluation. Does not retry: rollouts that fail are yielded like all others."""

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent conversations."""
        ...

    def model_record(self) -> Mapping[str, object]:
        """Return the record that identifies the model in results."""
        ...

    def engine_record(self) -> Mapping[str, object]:
        """Return the record that identifies the engine in results."""
        ...

    def sample_rollouts(self, environment: Environment, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]:
        """Sample concurrently, and yield each transcript when its rollout ends."""
        ...

    def prompts_too_long(self, prompts: Mapping[ProblemKey, str]) -> Mapping[ProblemKey, int]:
        """Return the prompt lengths of the problems whose prompts leave no room for a complete response.

        Raises SettingsError if no prompt leaves room, and if a length exceeds the limit of a setting.
        """
        ...

    async def close(self) -> None: ...


async def open_sampler(settings: EvaluationSections, folder: Path) -> ModelSampler:
    """Open ``rollout.engine`` with the model in ``model.path``.

    ``settings`` must contain the limits of evaluation. Server logs are written to the evaluation's ``folder``. Raises
    SettingsError for settings or a model that the engine does not support, and WorldError if a server fails.
    """
    path = str(settings.model.path)
    tokenizer = read_tokenizer(path)
    codec = build_codec(tokenizer, path, build_chat_setup(settings, tokenizer, path))
    model = None
    if engine_facts(settings.rollout).in_process:
        model = read_model(path, settings.model).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    managed = engine_plugin(settings.rollout).managed(
        EngineSpecification(
            rollout=settings.rollout,
            policy=settings.model,
            policy_path=path,
            codec=codec,
            longest=longest_request_tokens(settings.rollout, None),
            folder=folder,
            model=model,
            trained=False,
        )
    )
    if model is None:
        fingerprint = await open_and_verify_engine(managed, settings, codec)
    else:
        fingerprint = model_fingerprint(model.state_dict().items())
    config = read_model_config_if_available(settings.model)
    return ModelSampler(
        engine=managed.engine,
        codec=codec,
        settings=settings,
        fingerprint=fingerprint,
        record=managed.identity_fields(),
        max_positions=None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None),
    )


def build_evaluation_environment(settings: EvaluationSections) -> Environment:
    """Build the environment of an evaluation without opening it.

    A chat format is applied only if the protocol requires it and no endpoint applies a chat template.
    """
    path = settings.model.path
    if path is None or settings.evaluation.endpoint.url is not None or not uses_chat_template(settings):
        return build_environment(settings)
    return build_environment(settings, build_chat_setup(settings, read_tokenizer(path), path))


@dataclass(frozen=True, kw_only=True)
class ModelSampler:
    """A `Sampler` that uses a local model and the rollout driver of training.

    Randomness depends on the seed, the benchmark, the problem's id, the sample's number and the attempt. Adding samples
    or benchmarks therefore changes no existing rollout. ``max_positions`` is the model's maximum sequence length.
    """

    engine: Engine
    codec: TextCodec
    settings: EvaluationSections
    fingerprint: str
    record: Mapping[str, object]
    max_positions: int | None = None

    @property
    def concurrency(self) -> int:
        return self.settings.rollout.concurrency

    def model_record(self) -> Mapping[str, object]:
        return {"name": self.settings.model.path, "fingerprint": self.fingerprint}

    def engine_record(self) -> Mapping[str, object]:
        return self.record

    async def sample_rollouts(
        self, environment: Environment, samples: Sequence[Sample]
    ) -> AsyncGenerator[Transcript, None]:
        """Sample each rollout as a separate group, so that it is yielded as soon as it ends."""
        driver = Driver(
            environment=environment,
            engine=self.engine,
            codec=self.codec,
            settings=self.settings.rollout.model_copy(update={"retries": 0}),
            seed=self.settings.seed,
        )
        by_index = {_request_index(sample): sample for sample in samples}
        if len(by_index) < len(samples):
            raise AssertionError("two samples have the same index: a sample was requested twice")
        requests = [Group(index=index, problem=sample.problem) for index, sample in by_index.items()]
        async with aclosing(driver.play_groups(requests, step=0, group_size=1)) as groups:
            async for group in groups:
                trajectory = concatenate_branches(group.trajectories)
                failure = driver.last_failure if trajectory.ended is Ended.INFRASTRUCTURE_FAILURE else None
                yield Transcript.from_trajectory(by_index[group.index], trajectory, failure=failure)

    def prompts_too_long(self, prompts: Mapping[ProblemKey, str]) -> Mapping[ProblemKey, int]:
        rollout = self.settings.rollout
        tokens = {problem: len(self.codec.encode_prompt(prompt)) for problem, prompt in prompts.items()}
        most = None if self.max_positions is None else self.max_positions - rollout.max_response_tokens
        unfit = {problem: count for problem, count in tokens.items() if most is not None and count > most}
        if len(unfit) == len(tokens):
            shortest = min(tokens, key=tokens.__getitem__)
            self._raise_too_long(
                shortest, tokens[shortest], "the number of positions of the model", self.max_positions or 0
            )
        problem = max(tokens.keys() - unfit.keys(), key=tokens.__getitem__)
        longest = tokens[problem]
        facts = engine_facts(rollout)
        if facts.kv_slots is not None and longest + rollout.max_response_tokens > facts.kv_slots:
            self._raise_too_long(problem, longest, "rollout.kv_cache_tokens", facts.kv_slots)
        if facts.prompt_limit is not None and longest > facts.prompt_limit:
            raise SettingsError(
                f"{_problem_name(problem)}: its prompt has {longest} tokens, but the servers are started with "
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}; set it to at least {longest}"
            )
        return unfit

    def _raise_too_long(self, problem: ProblemKey, prompt: int, name: str, limit: int) -> NoReturn:
        """Raise SettingsError because prompt and response together exceed ``limit``, the value of ``name``."""
        more = self.settings.rollout.max_response_tokens
        valid = [f"{name} of at least {prompt + more}"] if "." in name else []
        if limit > prompt:
            valid.append(f"evaluation.max_response_tokens of at most {limit - prompt}")
        raise SettingsError(
            f"{_problem_name(problem)}: its prompt of {prompt} tokens and a response of {more} tokens "
            "(evaluation.max_response_tokens or, if that is null, rollout.max_response_tokens) together exceed "
            f"{name} ({limit}); valid: " + (", or ".join(valid) or "shorter prompts")
        )

    async def close(self) -> None:
        await self.engine.close()


def _request_index(sample: Sample) -> int:
    """Return the sample's request index for the driver: 63 bits of a hash of the sample's identity."""
    name = f"{sample.benchmark}\0{sample.problem.id}\0{sample.number}\0{sample.attempt}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _problem_name(problem: ProblemKey) -> str:
    benchmark, name = problem
    return f"problem {name} of {benchmark}"


@dataclass(frozen=True, kw_only=True)
class EndpointSampler:
    """A `Sampler` that uses an OpenAI-compatible endpoint, without a local model."""

    engine: TextEngine
    settings: EvaluationSections

    @property
    def concurrency(self) -> int:
        return self.settings.evaluation.endpoint.concurrency

    def model_record(self) -> Mapping[str, object]:
        return {"name": self.engine.model, "fingerprint": self.engine.fingerprint()}

    def engine_record(self) -> Mapping[str, object]:
        return build_configured_engine_record(self.settings)

    async def sample_rollouts(
        self, environment: Environment, samples: Sequence[Sample]
    ) -> AsyncGenerator[Transcript, None]:
        remaining = iter(samples)
        throttle = EventLoopThrottle()

        async def run_conversations(finished: Callable[[Transcript], None]) -> None:
            for sample in remaining:
                policy = _EndpointPolicy(
                    problem=sample.problem,
                    settings=self.settings.rollout,
                    throttle=throttle,
                    sample_of=sample,
                    engine=self.engine,
                    keys=(self.settings.seed, sample.benchmark, sample.problem.id, sample.number, sample.attempt),
                )
                finished(await policy.roll_out(environment))

        async with aclosing(yield_from_tasks(min(self.concurrency, len(samples)), run_conversations)) as transcripts:
            async for transcript in transcripts:
                yield transcript

    def prompts_too_long(self, prompts: Mapping[ProblemKey, str]) -> Mapping[ProblemKey, int]:
        """Return an empty mapping, because the endpoint itself rejects prompts that are too long."""
        return {}

    async def close(self) -> None:
        await self.engine.close()


@dataclass(kw_only=True, eq=False)
class _EndpointPolicy(TurnPolicy[Transcript]):
    """Policy that samples its turns from an endpoint. ``conversation`` alternates between inputs and model turns."""

    sample_of: Sample
    engine: TextEngine
    keys: tuple[int | str, ...]
    conversation: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt_tokens: int = 0
    reward: float = 0.0
    refused: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def response_tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    def begin(self, prompt: str) -> None:
        self.conversation.append(prompt)

    async def _sample_turn(self, episode: Episode, limit: int) -> str | None:
        turn = sum(item.origin == "model" for item in self.turns)
        sampling = TextSampling(
            max_tokens=limit,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            seed=sampling_key(*self.keys, turn) >> 33,  # 31 bits, which every endpoint accepts
            stop=episode.stop_strings,
            is_complete=episode.turn_complete,
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
        self.turn_truncated = self.context_full = completion.finish_reason == "length"
        return completion.text

    def _record_turn_reward(self, reward: float) -> None:
        self.reward += reward

    def _append_observation(self, observation: str) -> bool:
        """Append an observation of any length, with its tokens estimated as characters / 4."""
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
