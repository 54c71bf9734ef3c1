"""Continuous batching against the plain thing: one teacher-forced forward of the whole sequence."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout.engine_requests import CODEC, ask, assert_exact, prompts, serving, teacher_forced
from rollout.fakes import EOS, tiny_model

from agentrl.rollout.engines.base import Completion, EngineError
from agentrl.rollout.engines.transformers import TransformersEngine

MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: tiny_model(heads=4, kv_heads=4),
    "grouped-query": lambda: tiny_model(heads=4, kv_heads=1),
    "qwen3": lambda: tiny_model(kind="qwen3"),
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


ID_OF_BYTE = {byte: CODEC.token_bytes.index(bytes([byte])) for byte in range(256)}


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
        await engine.update_weights(other.state_dict().items(), 4)
        assert engine.version == 4
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
