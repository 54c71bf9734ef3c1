"""Requests to the transformers engine, and the plain forward that its answers are held against."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from rollout.fakes import byte_codec

from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.settings import RolloutSettings

CODEC = byte_codec()


@asynccontextmanager
async def serving(model: Any, *, deterministic: bool = False, **changes: Any) -> AsyncIterator[TransformersEngine]:
    settings = RolloutSettings(**{"kv_cache_tokens": 65_536, **changes})
    engine = TransformersEngine(model, CODEC, settings, deterministic=deterministic)
    yield engine
    await engine.close()


def ask(
    engine: TransformersEngine,
    prompt: tuple[int, ...],
    *,
    name: str = "t",
    part: int = 0,
    seed: int = 0,
    max_tokens: int = 12,
    stop: tuple[str, ...] = (),
    temperature: float = 1.0,
) -> asyncio.Task[Completion]:
    sampling = Sampling(max_tokens=max_tokens, stop=stop, temperature=temperature)
    return asyncio.ensure_future(
        engine.generate(prompt, sampling, trajectory_id=name, request_id=f"{name}-{part:03d}", seed=seed)
    )


@torch.inference_mode()
def teacher_forced(model: Any, prompt: tuple[int, ...], sampled: tuple[int, ...], temperature: float = 1.0) -> Any:
    ids = torch.tensor([prompt + sampled])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def assert_exact(model: Any, prompt: tuple[int, ...], answer: Completion, temperature: float = 1.0) -> None:
    expected = teacher_forced(model, prompt, answer.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, rtol=0, atol=2e-5)
    assert answer.version_spans == ((0, len(answer.token_ids)),)


def prompts(count: int, *, longest: int = 40, seed: int = 0) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    return [tuple(numbers.randrange(256) for _ in range(numbers.randint(1, longest))) for _ in range(count)]
