"""The engine opened on servers that are faked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollout.fake_vllm import FakeVLLM
from rollout.fakes import byte_codec

from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.engines.replica import ServerRequirements
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.rollout.engines.vllm.engine import build_vllm_engine
from agentrl.rollout.settings import RolloutSettings

CODEC = byte_codec()
VOCABULARY = 257
PROMPT = (1, 2, 3)
NEEDS = ServerRequirements(codec=CODEC, vocabulary=VOCABULARY, max_tokens=200)


def rollout(servers: list[FakeVLLM] | list[str], *, kv: Any = "recomputed", **changes: Any) -> RolloutSettings:
    addresses = [item if isinstance(item, str) else item.address for item in servers]
    own = {"placement": "external", "addresses": addresses, "start_deadline": 5.0, **changes}
    return RolloutSettings(
        engine="vllm", max_prompt_tokens=100, max_turn_tokens=50, max_response_tokens=100, kv_on_update=kv, vllm=own
    )


@asynccontextmanager
async def opened(
    servers: list[FakeVLLM], *, needs: ServerRequirements = NEEDS, **changes: Any
) -> AsyncIterator[ServerEngine]:
    settings = rollout(servers, **changes)
    engine = build_vllm_engine(settings.vllm.addresses, needs, settings)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: ServerEngine,
    *,
    name: str = "t",
    prompt: tuple[int, ...] = PROMPT,
    seed: int = 7,
    **sampling: Any,
) -> Completion:
    return await engine.generate(
        prompt,
        Sampling(**{"max_tokens": 4, **sampling}),
        trajectory_id=name,
        request_id=f"{name}-0",
        seed=seed,
    )


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def is_up(engine: ServerEngine, place: int) -> bool:
    return engine._servers[place].load.is_up
