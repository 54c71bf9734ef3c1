"""Fakes of this room: a byte tokenizer, tiny random models, a scripted engine and scripted episodes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.episode import Environment
from agentrl_envs.types import Ended, Problem, Step, Verdict

EOS = 256


def byte_tokenizer() -> Any:
    """One token a byte; the special tokens are 256 (end), 257 and 258, and 259 is added but not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def byte_codec() -> TextCodec:
    return TextCodec(byte_tokenizer())


def tiny_model(
    *, kind: str = "qwen2", heads: int = 4, kv_heads: int = 2, attention: str = "sdpa", seed: int = 0
) -> Any:
    """A random model over the byte tokenizer's 260 ids (and 4 that no token has), far from uniform."""
    values: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "attn_implementation": attention,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**values, head_dim=16)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**values)).eval()


def completion(codec: TextCodec, text: str, reason: str = "stop", *, version: int = 0) -> Completion:
    """What an engine would give for ``text``; with reason ``eos`` the end token is sampled too."""
    ids = codec.encode(text) + ((codec.eos_id,) if reason == "eos" else ())
    return Completion(
        token_ids=ids,
        log_probs=tuple(-0.01 * (place + 1) for place in range(len(ids))),
        finish_reason=reason,  # type: ignore[arg-type]
        version_spans=((version, len(ids)),),
    )


class ScriptedEngine:
    """Answers each request by ``script(trajectory_id, n-th request of it)``; exceptions are raised, waits awaited."""

    def __init__(self, script: Callable[[str, int], Any]) -> None:
        self._script = script
        self.requests: list[tuple[str, tuple[int, ...], Sampling, int]] = []
        self.request_ids: list[str] = []
        self.released: list[str] = []
        self.counts: dict[str, int] = {}
        self.running = 0
        self.most = 0

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        self.requests.append((trajectory_id, token_ids, sampling, seed))
        self.request_ids.append(request_id)
        number = self.counts.get(trajectory_id, 0)
        self.counts[trajectory_id] = number + 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self._script(trajectory_id, number)
            if asyncio.iscoroutine(answer):
                answer = await answer
            else:
                await asyncio.sleep(0)
            if isinstance(answer, BaseException):
                raise answer
            if sampling.routes_from is not None:  # the route of a token is its index
                routed = range(sampling.routes_from, len(token_ids) + len(answer.token_ids) - 1)
                answer = replace(answer, routes=array("h", routed).tobytes())
            return answer
        finally:
            self.running -= 1

    def release(self, trajectory_id: str) -> None:
        self.released.append(trajectory_id)

    async def cache_use(self) -> None:
        return None

    async def health(self) -> str:
        return "scripted"

    async def close(self) -> None:
        pass


class ScriptedEpisode:
    """Says ``prompt``, then the n-th of ``steps`` (an exception is raised, a wait awaited first)."""

    def __init__(self, steps: Sequence[Any], *, prompt: str = "P", complete: str = "END") -> None:
        self.stop_strings = ("END", "HALT")
        self.prompt = prompt
        self.actions: list[str] = []
        self.closed = 0
        self._steps = list(steps)
        self._complete = complete

    def turn_complete(self, text: str) -> bool:
        return self._complete in text

    async def start(self) -> str:
        return self.prompt

    async def step(self, action: str) -> Step:
        self.actions.append(action)
        answer = self._steps.pop(0)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def fork(self) -> ScriptedEpisode:
        return ScriptedEpisode(self._steps, prompt=self.prompt, complete=self._complete)

    async def close(self) -> None:
        self.closed += 1


class ScriptedEnvironment(Environment):
    """Makes each episode with ``build(problem, how many were made before)`` and keeps them all."""

    def __init__(self, build: Callable[[Problem, int], ScriptedEpisode]) -> None:
        self._build = build
        self.episodes: list[ScriptedEpisode] = []

    async def open(self) -> None:
        pass

    def episode(self, problem: Problem) -> ScriptedEpisode:
        self.episodes.append(self._build(problem, len(self.episodes)))
        return self.episodes[-1]

    async def close(self) -> None:
        pass

    def describe(self) -> list[str]:
        return ["scripted"]


def goes_on(observation: str = "E") -> Step:
    return Step(observation=observation, reward=0.0, ended=None)


def ends(ended: Ended = Ended.ANSWERED, *, reward: float = 0.0, observation: str = "", **changes: Any) -> Step:
    return Step(observation=observation, reward=reward, ended=ended, **changes)


def problem(number: int = 0) -> Problem:
    return Problem(id=f"toy-{number}", statement="2 + 3?", answer="5", source="toy")


def played(
    reward: float = 0.0,
    *,
    group: int = 0,
    sample: int = 0,
    ended: Ended = Ended.ANSWERED,
    verdict: Verdict | None = None,
    tokens: int = 2,
    **changes: Any,
) -> Trajectory:
    """A finished trajectory of one turn."""
    segment = Segment(
        origin="model",
        token_ids=(1,) * tokens,
        text="A",
        log_probs=(-0.5,) * tokens,
        version_spans=((0, tokens),),
        reward=reward,
    )
    values: dict[str, Any] = {"prompt_ids": (9, 9, 9), "segments": (segment,), **changes}
    return Trajectory(
        problem=problem(group), step=0, group=group, sample=sample, ended=ended, verdict=verdict, **values
    )


def assert_routed(trajectory: Trajectory) -> None:
    """Every token up to the one before the last model token has the route that :class:`ScriptedEngine` gave it."""
    routes = array("h", b"".join(segment.routes for segment in trajectory.segments))
    mask = trajectory.response_mask
    assert list(routes) == list(range(len(trajectory.prompt_ids) + max(at for at, own in enumerate(mask) if own)))
