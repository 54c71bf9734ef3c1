"""Continuous batching against the plain thing: one teacher-forced forward of the whole sequence."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from rollout.fakes import EOS, byte_codec, tiny_model

from agentrl.errors import SettingsError
from agentrl.models.anatomy import take_apart
from agentrl.rollout.engines.base import CacheUse, Completion, EngineError, Sampling
from agentrl.rollout.engines.batcher import Batcher, Request
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


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: tiny_model(heads=4, kv_heads=4),
    "grouped-query": lambda: tiny_model(heads=4, kv_heads=1),
    "qwen3": lambda: tiny_model(kind="qwen3"),
    "eager": lambda: tiny_model(attention="eager"),
}


@pytest.mark.parametrize("name", MODELS)
async def test_many_requests_of_all_lengths_match_the_plain_forward(name: str) -> None:
    model = MODELS[name]()
    asked = prompts(24)
    asked[5:9] = [asked[4]] * 4  # a group's shared prompt
    lengths = [1 + 3 * (index % 8) for index in range(24)]
    async with serving(model, max_batch_tokens=128) as engine:
        answers = await asyncio.gather(
            *(ask(engine, asked[i], name=f"t{i}", seed=i, max_tokens=lengths[i]) for i in range(24))
        )
    for prompt, answer, length in zip(asked, answers, lengths, strict=True):
        assert_exact(model, prompt, answer)
        assert len(answer.token_ids) == length or answer.finish_reason == "eos"
    assert len({answer.token_ids for answer in answers[4:9] if len(answer.token_ids) > 5}) > 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_log_probs_are_those_of_the_temperature(temperature: float) -> None:
    model = tiny_model()
    async with serving(model) as engine:
        answer = await ask(engine, (1, 2, 3), temperature=temperature, max_tokens=30)
    assert_exact(model, (1, 2, 3), answer, temperature)


async def _converse(engine: TransformersEngine, model: Any, name: str, turns: int, seed: int) -> None:
    """A trajectory of several turns with observations between; checks every turn."""
    numbers = random.Random(seed)
    context = tuple(numbers.randrange(256) for _ in range(numbers.randint(2, 30)))
    for turn in range(turns):
        answer = await ask(engine, context, name=name, part=turn, seed=seed + turn, max_tokens=numbers.randint(1, 9))
        assert_exact(model, context, answer)
        context += answer.token_ids + tuple(numbers.randrange(256) for _ in range(numbers.randint(0, 7)))
    engine.release(name)


@pytest.mark.parametrize("cache", [256, 1024, 65_536])
async def test_turns_go_on_from_kept_prefixes_also_after_moves_and_evictions(cache: int) -> None:
    # 256 slots hold two or three of the twenty conversations: rows are evicted, shared and moved all the time.
    model = tiny_model()
    async with serving(model, kv_cache_tokens=cache, max_batch_tokens=64) as engine:
        await asyncio.gather(*(_converse(engine, model, f"t{i}", 2 + i % 4, 100 * i) for i in range(20)))


async def test_a_trajectory_may_go_on_from_another_history() -> None:
    model = tiny_model()
    async with serving(model) as engine:
        first = await ask(engine, (1, 2, 3, 4), name="t")
        shorter = await ask(engine, (1, 2), name="t", part=1)
        other = await ask(engine, (9, 2, 3, 4, 5), name="t", part=2)
    for prompt, answer in (((1, 2, 3, 4), first), ((1, 2), shorter), ((9, 2, 3, 4, 5), other)):
        assert_exact(model, prompt, answer)


async def test_two_requests_of_one_trajectory_wait_for_each_other() -> None:
    model = tiny_model()
    async with serving(model) as engine:
        both = await asyncio.gather(*(ask(engine, (5, 6), name="t", part=i, seed=i, max_tokens=20) for i in (0, 1)))
    for answer in both:
        assert_exact(model, (5, 6), answer)


async def test_sampling_does_not_depend_on_the_company() -> None:
    model = tiny_model()
    async with serving(model) as engine:
        alone = await ask(engine, (1, 2, 3), name="a", seed=42)
        crowd = [ask(engine, prompt, name=f"c{i}", seed=i) for i, prompt in enumerate(prompts(10))]
        together = await ask(engine, (1, 2, 3), name="b", seed=42)
        other = await ask(engine, (1, 2, 3), name="d", seed=43)
        await asyncio.gather(*crowd)
    assert together.token_ids == alone.token_ids != other.token_ids


def _forced(sequence: bytes | list[int]) -> Any:
    """A model that samples this sequence for ever, whatever the prompt's last token is outside of it."""
    ids = list(sequence)
    following = {token: ids[(place + 1) % len(ids)] for place, token in enumerate(ids)}
    model = tiny_model()
    hidden = model.config.hidden_size

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(1, 1)  # a model without one has no head for `transformers` either

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            states = torch.zeros(*input_ids.shape, hidden)
            states[..., 0] = input_ids
            return type("Output", (), {"last_hidden_state": states})()

        def get_decoder(self) -> Any:
            return self

    class Head(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            logits = torch.full((len(states), model.config.vocab_size), -50.0)
            for row, token in enumerate(states[:, 0].tolist()):
                logits[row, following.get(int(token), ids[0])] = 50.0
            return logits

    model.model, model.lm_head = Table(), Head(hidden, model.config.vocab_size)
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
    return model


def bytes_as_ids(text: str) -> list[int]:
    return [ID_OF_BYTE[byte] for byte in text.encode()]


ID_OF_BYTE = {byte: CODEC.table.index(bytes([byte])) for byte in range(256)}


async def test_a_stop_string_is_found_across_tokens_and_its_last_token_is_kept() -> None:
    async with serving(_forced(bytes_as_ids("ab\n```"))) as engine:
        answer = await ask(engine, CODEC.encode("Q"), stop=("zzz", "\n`"), max_tokens=50)
        assert (CODEC.decode(answer.token_ids), answer.finish_reason) == ("ab\n`", "stop")


async def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    async with serving(_forced(bytes_as_ids("bcd"))) as engine:
        answer = await ask(engine, CODEC.encode("a"), stop=("ab",), max_tokens=6)
        assert (CODEC.decode(answer.token_ids), answer.finish_reason) == ("bcdbcd", "length")


async def test_the_end_token_is_part_of_the_completion() -> None:
    async with serving(_forced([*bytes_as_ids("xy"), EOS])) as engine:
        answer = await ask(engine, CODEC.encode("Q"), max_tokens=3, stop=("y<|endoftext|>",))
        assert (answer.token_ids[-1], answer.finish_reason, len(answer.log_probs)) == (EOS, "eos", 3)
        cut = await ask(engine, CODEC.encode("Q"), max_tokens=2, part=1)
        assert (CODEC.decode(cut.token_ids), cut.finish_reason) == ("xy", "length")


async def test_a_stop_string_at_the_token_limit_is_a_stop() -> None:
    async with serving(_forced(bytes_as_ids("abc"))) as engine:
        answer = await ask(engine, CODEC.encode("Q"), stop=("bc",), max_tokens=3)
        assert answer.finish_reason == "stop"


async def test_a_cancelled_request_leaves_and_the_others_are_exact() -> None:
    model = tiny_model()
    async with serving(model) as engine:
        asked = prompts(8)
        tasks = [ask(engine, prompt, name=f"t{i}", seed=i, max_tokens=60) for i, prompt in enumerate(asked)]
        short = await ask(engine, (3,), name="short", max_tokens=1)
        assert len(short.token_ids) == 1  # by now all run
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True, False] * 4
        for prompt, answer in list(zip(asked, answers, strict=True))[1::2]:
            assert isinstance(answer, Completion)
            assert_exact(model, prompt, answer)
        again = await ask(engine, asked[0], name="t0", part=1, seed=0, max_tokens=5)
        assert_exact(model, asked[0], again)
        await engine.update_weights((), 1)  # nothing runs any more


async def test_a_request_that_is_given_up_ends_and_the_weights_may_change() -> None:
    async with serving(tiny_model()) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask(engine, (1,), max_tokens=900, stop=(), seed=3)
        await engine.update_weights((), 1)
        assert (await ask(engine, (1,), max_tokens=1)).version_spans == ((1, 1),)


async def test_a_request_larger_than_the_cache_fails_alone_and_says_why() -> None:
    model = tiny_model()
    async with serving(model, kv_cache_tokens=128) as engine:
        fits = [ask(engine, (1, 2), name=f"f{i}", seed=i, max_tokens=50) for i in range(3)]
        with pytest.raises(EngineError, match="kv_cache_tokens=128"):
            await ask(engine, (1,) * 100, name="large", max_tokens=60)
        for answer in await asyncio.gather(*fits):
            assert_exact(model, (1, 2), answer)
        assert_exact(model, (4,), await ask(engine, (4,), name="after"))


async def test_idle_prefixes_give_way_to_a_long_request() -> None:
    model = tiny_model()
    async with serving(model, kv_cache_tokens=512) as engine:
        await asyncio.gather(*(ask(engine, (i, 2), name=f"t{i}", max_tokens=20) for i in range(8)))
        prompt = prompts(1, seed=5)[0] + (7,) * 300
        assert_exact(model, prompt, await ask(engine, prompt, name="long", max_tokens=100))


@pytest.mark.parametrize("kv", ["recomputed", "kept"])
async def test_weights_change_under_running_requests(kv: str) -> None:
    model, old, new = tiny_model(), tiny_model(), tiny_model(seed=1)
    asked = prompts(6)
    async with serving(model, kv_on_update=kv, max_batch_tokens=64) as engine:
        tasks = [
            ask(engine, prompt, name=f"t{i}", max_tokens=220, stop=(), seed=i)
            for i, prompt in enumerate([*asked, asked[0]])
        ]
        while not all(request.sampled for request in engine._futures) or len(engine._futures) < len(tasks):
            await asyncio.sleep(0.001)
        requests = list(engine._futures)  # one may end before it is held
        engine.pause()
        await engine.update_weights(new.state_dict().items(), 3)
        counts = [len(request.sampled) for request in requests]
        await asyncio.sleep(0.05)
        assert counts == [len(request.sampled) for request in requests]  # held
        engine.resume()
        answers = await asyncio.gather(*tasks)
    both = 0
    for prompt, answer in zip([*asked, asked[0]], answers, strict=True):
        log_probs = torch.tensor(answer.log_probs).double()
        assert sum(count for _, count in answer.version_spans) == len(answer.token_ids)
        assert [version for version, _ in answer.version_spans] in ([0, 3], [0])
        first = answer.version_spans[0][1]
        torch.testing.assert_close(
            log_probs[:first], teacher_forced(old, prompt, answer.token_ids)[:first], rtol=0, atol=2e-5
        )
        if len(answer.version_spans) == 1:
            continue
        both += 1
        after = teacher_forced(new, prompt, answer.token_ids)[first:]
        difference = float((log_probs[first:] - after).abs().max())
        # Kept keys and values are of the old weights: a distribution of neither policy.
        assert difference < 2e-5 if kv == "recomputed" else difference > 1e-4
    assert both > 0


async def test_new_weights_forget_old_prefixes() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    async with serving(model) as engine:
        first = await ask(engine, (1, 2, 3), name="t")
        before = engine.fingerprint()
        await engine.update_weights(other.state_dict().items(), 4)
        assert (engine.version, engine.fingerprint() != before) == (4, True)
        context = (1, 2, 3, *first.token_ids, 5)
        answer = await ask(engine, context, name="t", part=1)
    expected = teacher_forced(other, context, answer.token_ids)
    torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, rtol=0, atol=2e-5)
    assert answer.version_spans == ((4, len(answer.token_ids)),)


async def test_weights_of_another_model_are_refused() -> None:
    async with serving(tiny_model()) as engine:
        with pytest.raises(EngineError, match="do not fit"):
            await engine.update_weights([("model.norm.weight", torch.zeros(7))], 1)


async def test_score_is_the_plain_forward_at_temperature_one() -> None:
    model = tiny_model()
    ids = (4, 8, 15, 16, 23, 42)
    async with serving(model) as engine:
        scores = await engine.score(ids)
    torch.testing.assert_close(
        torch.tensor(scores).double(), teacher_forced(model, ids[:1], ids[1:]), rtol=0, atol=2e-5
    )


async def test_a_bug_in_a_forward_reaches_everyone_who_waits_as_it_is() -> None:
    model = tiny_model()
    async with serving(model) as engine:
        outside = ask(engine, (100_000,), name="bad", max_tokens=5)
        beside = ask(engine, (1, 2), name="beside", max_tokens=5)
        for task in (outside, beside):
            with pytest.raises(IndexError):
                await task
        assert_exact(model, (1, 2), await ask(engine, (1, 2), name="after"))


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
            "from now on at most 500 tokens in a forward (rollout.max_batch_tokens) and 40 in the cache "
            "(rollout.kv_cache_tokens)"
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


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_an_attention_that_ignores_the_mask_is_refused(attention: str) -> None:
    model = tiny_model()
    model.config._attn_implementation_internal = attention
    with pytest.raises(SettingsError, match=f"model.attention={attention}"):
        TransformersEngine(model, CODEC, RolloutSettings())


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
        model, take_apart(model), eos_ids=frozenset({EOS}), table=CODEC.table, max_batch_tokens=64, kv_cache_tokens=512
    )
    requests = [
        Request(
            token_ids=(1, 2),
            sampling=Sampling(max_tokens=50),
            trajectory_id=name,
            request_id=name,
            seed=0,
            stop=(),
        )
        for name in ("runs", "waits")
    ]
    batcher.add(requests[0])
    batcher.advance()
    batcher.add(requests[1])
    with pytest.raises(EngineError, match="cannot be cleared"):
        batcher.clear()
    for request in requests:
        request.cancelled = True
    batcher.clear()
    assert not batcher.busy


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
        resting = asyncio.create_task(engine.rest())
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
        with pytest.raises(EngineError, match="cannot rest"):
            await engine.rest()
        await going_on


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_every_order_of_arrivals_releases_and_cancellations_gives_exact_log_probs(seed: int) -> None:
    """Also a release that comes after the same trajectory was started afresh. Nothing is lost."""
    chance = random.Random(seed)
    model = tiny_model(seed=seed)
    batcher = Batcher(
        model,
        take_apart(model),
        eos_ids=frozenset((EOS,)),
        table=byte_codec().table,
        max_batch_tokens=chance.choice((30, 1000)),
        kv_cache_tokens=chance.choice((200, 4000)),
    )
    contexts: dict[str, tuple[int, ...]] = {}
    under_way: dict[str, Request] = {}
    ended = 0
    for move in range(1500):
        name = f"t{chance.randrange(8)}"
        if name not in under_way and move < 300:
            prompt = contexts.setdefault(name, prompts(3, seed=seed)[chance.randrange(3)])
            request = Request(
                token_ids=prompt,
                sampling=Sampling(max_tokens=chance.randint(1, 12)),
                trajectory_id=name,
                request_id=f"{name}-{move}",
                seed=move,
                stop=(),
            )
            under_way[name] = request
            batcher.add(request)
        elif name in under_way and chance.random() < 0.05:
            under_way.pop(name).cancelled = True
            contexts.pop(name)
        if chance.random() < 0.2:
            batcher.release(name)  # of an earlier life of this name, perhaps
        if move >= 300 and not batcher.busy:
            break
        for done in batcher.advance() if batcher.busy else ():
            if not done.cancelled:
                assert under_way.pop(done.trajectory_id) is done
                done.close_span(0)
                assert_exact(model, done.token_ids, done.completion())
                ended += 1
                longer = (*done.context, *range(chance.randrange(5)))
                contexts[done.trajectory_id] = longer if len(longer) < 120 else (1, 2, 3)
    assert not under_way
    assert ended > 50
