"""The transformers engine at work: memory, order of arrival, cancellation, rest; its answers stay exact."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout.engine_requests import CODEC, ask, assert_exact, prompts, serving
from rollout.fakes import EOS, byte_codec, tiny_model

from agentrl.models.attention import ATTENTION
from agentrl.models.model_parts import split_model
from agentrl.rollout.engines.base import CacheUse, EngineError, Sampling
from agentrl.rollout.engines.batcher import Batcher, TurnInProgress
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.settings import RolloutSettings


def rows_for(most: int) -> Callable[..., None]:
    """A hook: memory for so many rows."""

    def forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[0] > most:
            raise torch.OutOfMemoryError("no room for so many rows")

    return forward


async def test_out_of_memory_halves_what_is_computed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    asked = [(place, 1, 2) for place in range(8)]
    async with serving(model, max_batch_tokens=1000) as engine:
        hook = model.model.register_forward_pre_hook(rows_for(4), with_kwargs=True)
        with caplog.at_level(logging.WARNING):
            tasks = [ask(engine, prompt, name=f"t{i}", max_tokens=7) for i, prompt in enumerate(asked)]
            failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(item) for item in failed] == ["the engine ran out of memory: no room for so many rows"] * 8
        assert all(isinstance(item, EngineError) for item in failed)
        assert (
            "reducing rollout.max_batch_tokens to 500 and rollout.kv_cache_tokens to 40 for the rest of the run"
        ) in caplog.text
        use = await engine.cache_use()
        assert (use.tokens, use.used) == (40, 0.0)
        tasks = [ask(engine, prompt, name=f"t{i}", max_tokens=7) for i, prompt in enumerate(asked)]
        answers = await asyncio.gather(*tasks)
        hook.remove()
    for prompt, answer in zip(asked, answers, strict=True):
        assert_exact(model, prompt, answer)


async def test_how_full_the_cache_is_and_who_lost_a_prefix() -> None:
    async with serving(tiny_model(), kv_cache_tokens=64) as engine:
        assert await engine.cache_use() == CacheUse(tokens=64, used=0.0, preemptions=0)
        for name in ("a", "b", "c"):
            await ask(engine, (1, 2, 3, 4), name=name, max_tokens=12)
        assert await engine.cache_use() == CacheUse(tokens=64, used=0.75, preemptions=0)
        await ask(engine, (1, 2, 3, 4), name="d", max_tokens=12)
        await ask(engine, (1, 2, 3, 4), name="e", max_tokens=12)
        assert await engine.cache_use() == CacheUse(tokens=64, used=1.0, preemptions=1)
        for name in "abcde":
            engine.release(name)
        await ask(engine, (1, 2), name="f", max_tokens=3)
        assert await engine.cache_use() == CacheUse(tokens=64, used=0.25, preemptions=1)


async def test_closing_cancels_what_runs() -> None:
    engine = TransformersEngine(tiny_model(), CODEC, RolloutSettings(kv_cache_tokens=65_536))
    task = ask(engine, (1,), max_tokens=900)
    await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_engine_computes_attention_as_training_does() -> None:
    model = tiny_model(attention="eager")
    TransformersEngine(model, CODEC, RolloutSettings())
    assert model.config._attn_implementation == ATTENTION


async def _round(order: list[int]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    asked = prompts(16, seed=3)
    async with serving(tiny_model(), deterministic=True, max_batch_tokens=96) as engine:
        results = []
        for turn in range(2):
            tasks = {
                i: ask(engine, asked[i] + (turn,), name=f"t{i:02d}", part=turn, seed=i, max_tokens=3 + i) for i in order
            }
            answers = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
            results += [(answers[i].token_ids, answers[i].log_probs) for i in range(16)]
        return results


async def test_deterministic_results_are_bitwise_equal_for_any_order_of_arrival() -> None:
    shuffled = list(range(16))
    random.Random(1).shuffle(shuffled)
    assert await _round(list(range(16))) == await _round(shuffled) == await _round(list(range(16))[::-1])


def test_cancelled_requests_do_not_hold_up_new_weights() -> None:
    # The driver cancels and the trainer publishes before the engine's thread has seen the cancellation.
    model = tiny_model()
    batcher = Batcher(
        model,
        split_model(model),
        eos_ids=frozenset({EOS}),
        token_bytes=CODEC.token_bytes,
        max_batch_tokens=64,
        kv_cache_tokens=512,
    )
    requests = [
        TurnInProgress(
            token_ids=(1, 2),
            sampling=Sampling(max_tokens=50),
            trajectory_id=name,
            request_id=name,
            seed=0,
            stop=(),
        )
        for name in ("runs", "waits")
    ]
    batcher.add_request(requests[0])
    batcher.run_forward_pass()
    batcher.add_request(requests[1])
    with pytest.raises(EngineError, match="cannot be cleared"):
        batcher.drop_prefixes()
    for request in requests:
        request.cancelled = True
    batcher.drop_prefixes()
    assert not batcher.is_busy


async def test_the_engine_rests_only_when_the_forward_of_a_request_that_was_given_up_is_over() -> None:
    """Weights that are trained next must not change under it."""
    model = tiny_model()
    begun, go_on = threading.Event(), threading.Event()
    running: list[bool] = []

    def slow(*_: Any) -> None:
        running.append(True)
        begun.set()
        assert go_on.wait(60)

    async with serving(model) as engine:
        handle = model.model.register_forward_pre_hook(slow)
        model.model.register_forward_hook(lambda *_: running.clear())
        asked = ask(engine, (1, 2), max_tokens=900)
        await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asked
        resting = asyncio.create_task(engine.wait_until_idle())
        await asyncio.sleep(0)
        assert (resting.done(), running) == (False, [True])
        handle.remove()
        go_on.set()
        await resting
        assert not running
        assert_exact(model, (3, 4), await ask(engine, (3, 4), name="after"))


async def test_the_engine_does_not_rest_while_a_request_goes_on() -> None:
    async with serving(tiny_model()) as engine:
        going_on = ask(engine, (1, 2), max_tokens=200)
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot become idle"):
            await engine.wait_until_idle()
        await going_on


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_every_order_of_arrivals_releases_and_cancellations_gives_exact_log_probs(seed: int) -> None:
    """Also a release that comes after the same trajectory was started afresh. Nothing is lost."""
    chance = random.Random(seed)
    model = tiny_model(seed=seed)
    batcher = Batcher(
        model,
        split_model(model),
        eos_ids=frozenset((EOS,)),
        token_bytes=byte_codec().token_bytes,
        max_batch_tokens=chance.choice((30, 1000)),
        kv_cache_tokens=chance.choice((200, 4000)),
    )
    contexts: dict[str, tuple[int, ...]] = {}
    under_way: dict[str, TurnInProgress] = {}
    ended = 0
    for move in range(1500):
        name = f"t{chance.randrange(8)}"
        if name not in under_way and move < 300:
            prompt = contexts.setdefault(name, prompts(3, seed=seed)[chance.randrange(3)])
            request = TurnInProgress(
                token_ids=prompt,
                sampling=Sampling(max_tokens=chance.randint(1, 12)),
                trajectory_id=name,
                request_id=f"{name}-{move}",
                seed=move,
                stop=(),
            )
            under_way[name] = request
            batcher.add_request(request)
        elif name in under_way and chance.random() < 0.05:
            under_way.pop(name).cancelled = True
            contexts.pop(name)
        if chance.random() < 0.2:
            batcher.release(name)  # of an earlier life of this name, perhaps
        if move >= 300 and not batcher.is_busy:
            break
        for done in batcher.run_forward_pass() if batcher.is_busy else ():
            if not done.cancelled:
                assert under_way.pop(done.trajectory_id) is done
                done.record_version_span(0)
                assert_exact(model, done.token_ids, done.build_completion())
                ended += 1
                longer = (*done.context_tokens, *range(chance.randrange(5)))
                contexts[done.trajectory_id] = longer if len(longer) < 120 else (1, 2, 3)
    assert not under_way
    assert ended > 50
