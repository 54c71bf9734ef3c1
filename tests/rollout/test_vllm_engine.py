"""The engine against servers that misbehave. What real servers do is tested in tests/rollout/vllm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rollout.fake_vllm import FakeVLLM, fakes, sampled, unused_port
from rollout.fakes import byte_codec

from agentrl.errors import SettingsError, WorldError
from agentrl.rollout.engines.base import CacheUse, Completion, EngineError, Sampling
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.rollout.settings import RolloutSettings

CODEC = byte_codec()
VOCABULARY = 257
PROMPT = (1, 2, 3)


def rollout(servers: list[FakeVLLM] | list[str], *, kv: Any = "recomputed", **changes: Any) -> RolloutSettings:
    addresses = [item if isinstance(item, str) else item.address for item in servers]
    own = {"placement": "external", "addresses": addresses, "start_deadline": 5.0, **changes}
    return RolloutSettings(
        engine="vllm", max_prompt_tokens=100, max_turn_tokens=50, max_response_tokens=100, kv_on_update=kv, vllm=own
    )


@asynccontextmanager
async def opened(servers: list[FakeVLLM], **changes: Any) -> AsyncIterator[VLLMEngine]:
    settings = rollout(servers, **changes)
    engine = VLLMEngine(settings.vllm.addresses, CODEC, settings, vocabulary=VOCABULARY)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: VLLMEngine,
    *,
    name: str = "t",
    prompt: tuple[int, ...] = PROMPT,
    seed: int = 7,
    seconds: float = 30.0,
    **sampling: Any,
) -> Completion:
    return await engine.generate(
        prompt,
        Sampling(**{"max_tokens": 4, **sampling}),
        trajectory_id=name,
        request_id=f"{name}-0",
        seed=seed,
        deadline=asyncio.get_running_loop().time() + seconds,
    )


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def is_up(engine: VLLMEngine, place: int) -> bool:
    return engine._balancer.loads[place].up


# -- what is said ---------------------------------------------------------------------------------------------------


async def test_a_turn_is_asked_for_and_read_exactly() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        answer = await ask(engine, stop=("END",), temperature=0.7, seed=2**64 - 1)
        body = server.bodies[0]
    assert answer == Completion(
        token_ids=(8, 9, 10, 11), log_probs=(-0.5,) * 4, finish_reason="length", version_spans=((0, 4),)
    )
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.7,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [CODEC.eos_id],
        "stop": ["END"],
        "seed": 2**63 - 1,
    }


async def test_how_a_turn_ends_is_told_by_its_last_token() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.on_generate = lambda body: (200, {"choices": [sampled([5, CODEC.eos_id], reason="stop")]})
        assert (await ask(engine)).finish_reason == "eos"
        server.on_generate = lambda body: (200, {"choices": [sampled([5, 6], reason="stop", stop_reason="END")]})
        assert (await ask(engine)).finish_reason == "stop"


async def test_greedy_tokens_have_log_probability_zero() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        assert (await ask(engine, temperature=0.0)).log_probs == (0.0,) * 4


async def test_unseeded_requests_carry_no_seed() -> None:
    async with fakes(CODEC) as (server,), opened([server], seeded=False) as engine:
        await ask(engine)
        assert "seed" not in server.bodies[0]["sampling_params"]


async def test_scores_are_of_the_prompts_own_tokens() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.scores = lambda version, place: -float(place)
        assert await engine.score((4, 5, 6)) == (0.0, -1.0)


# -- the wrong server -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"controls": False}, "environment variable VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs, before the temperature: start it with --logprobs-mode"),
        ({"caching": False}, "--enable-prefix-caching"),
        ({"max_model_len": 199}, "limit is 199, .* together are 200: start it with --max-model-len 200"),
        ({"device": "cpu"}, "--no-enable-chunked-prefill, or set rollout.vllm.seeded=false"),
        ({"tokenizes": False}, "without --tokens-only"),
        ({"vocabulary": 256}, "another model: the policy has 257 tokens, the server's model has fewer"),
        ({"vocabulary": 300}, "another model: the policy has 257 tokens, the server's model has more"),
    ],
)
async def test_a_server_that_cannot_be_used_says_why(change: dict[str, Any], message: str) -> None:
    async with fakes(CODEC) as (server,):
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(SettingsError, match=f"{server.address} cannot be used: .*{message}"):
            async with opened([server]):
                pass


async def test_without_seeds_a_server_on_a_cpu_may_prefill_in_parts() -> None:
    async with fakes(CODEC) as (server,):
        server.device = "cpu"
        async with opened([server], seeded=False) as engine:
            await ask(engine)


async def test_another_tokenizer_is_told_by_its_first_difference() -> None:
    class Shifted:
        def encode(self, text: str) -> tuple[int, ...]:
            return tuple(token + (place == 3) for place, token in enumerate(CODEC.encode(text)))

    async with fakes(CODEC) as (server,):
        server.codec = Shifted()  # type: ignore[assignment]
        with pytest.raises(SettingsError, match=r"another tokenizer .* \[220, 82, 84\] here and \[221, 82, 84\] there"):
            async with opened([server]):
                pass


async def test_nobody_at_the_address() -> None:
    settings = rollout([f"http://127.0.0.1:{unused_port()}"], start_deadline=0.3)
    engine = VLLMEngine(settings.vllm.addresses, CODEC, settings, vocabulary=VOCABULARY)
    with pytest.raises(WorldError, match=r"rollout.vllm.start_deadline=0.3 s in vain .* cannot be reached"):
        await engine.open()
    await engine.close()


@pytest.mark.parametrize("path", ["/server_info", "/weight_info", "/get_world_size", "/version", "/tokenize"])
@pytest.mark.parametrize("said", [[1], {}, None, "x", {"tokens": 3}, b"<html>"], ids=repr)
async def test_what_is_no_vllm_server_is_told_in_one_message(path: str, said: Any) -> None:
    async with fakes(CODEC) as (server,):
        server.says[path] = said
        with pytest.raises((SettingsError, WorldError), match=server.address):
            async with opened([server]):
                pass


async def test_another_release_of_vllm_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with fakes(CODEC) as (server,):
        server.says["/version"] = {"version": "0.29.1"}
        with caplog.at_level(logging.WARNING):
            async with opened([server]):
                pass
    assert f"{server.address} is vLLM 0.29.1; agentrl is made for 0.32" in caplog.text


# -- garbage --------------------------------------------------------------------------------------------------------

GARBAGE: dict[str, tuple[Any, str]] = {
    "text": (b"<html>busy</html>", "not JSON"),
    "no choices": ({"choices": []}, "not one choice"),
    "a list": ([1], "not one choice"),
    "no tokens": ({"choices": [sampled([])]}, "not 1 to 4 token ids"),
    "too many tokens": ({"choices": [sampled([1] * 5)]}, "not 1 to 4 token ids"),
    "text for tokens": ({"choices": [sampled([1]) | {"token_ids": "1"}]}, "not 1 to 4 token ids"),
    "negative token": ({"choices": [sampled([-1, 1, 1, 1])]}, "not 1 to 4 token ids"),
    "cut by the server": ({"choices": [sampled([1, 2])]}, "its own limit on tokens"),
    "aborted": ({"choices": [sampled([1], reason="abort")]}, "for the reason 'abort'"),
    "no log-probs": ({"choices": [sampled([1] * 4, logprobs=None)]}, "not 4 log-probabilities"),
    "log-probs of others": (
        {"choices": [sampled([1] * 4, logprobs=sampled([1, 1, 2, 1])["logprobs"])]},
        "another token than the sampled 1",
    ),
    "clamped": (
        {"choices": [sampled([1] * 4, logprobs={"content": [{"token_id": 1, "logprob": -9999.0}] * 4})]},
        "-9999.0 is no log-probability",
    ),
    "positive": (
        {"choices": [sampled([1] * 4, logprobs={"content": [{"token_id": 1, "logprob": 0.1}] * 4})]},
        "0.1 is no log-probability",
    ),
    "no versions": ({"choices": [sampled([1] * 4, weight_versions=None)]}, "do not cover 4 tokens"),
    "unlabelled": ({"choices": [sampled([1] * 4, version="default")]}, "the label 'default'"),
    "earlier version": ({"choices": [sampled([1] * 4, version="-1")]}, "the label '-1'"),
    "later version": ({"choices": [sampled([1] * 4, version="3")]}, r"versions \[3\] to a request of version 0"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_never_a_completion(name: str) -> None:
    answer, message = GARBAGE[name]
    async with fakes(CODEC) as (server,), opened([server], request_retries=0) as engine:
        server.on_generate = lambda body: (200, answer)
        with pytest.raises(EngineError, match=message):
            await ask(engine)


# -- failures -------------------------------------------------------------------------------------------------------


async def test_a_trajectory_stays_where_its_prefix_is_and_others_spread() -> None:
    async with fakes(CODEC, 2) as servers, opened(servers) as engine:
        for turn in range(3):
            await ask(engine, name="one", prompt=PROMPT * (turn + 1))
        assert [len(server.bodies) for server in servers] == [3, 0]
        holds = asyncio.Event()

        async def wait(body: dict[str, Any]) -> None:
            await holds.wait()

        for server in servers:
            server.on_generate = wait
        tasks = [asyncio.create_task(ask(engine, name=f"many{i}")) for i in range(8)]
        await eventually(lambda: sum(len(server.bodies) for server in servers) == 11)
        assert [len(server.bodies) for server in servers] == [7, 4]
        holds.set()
        await asyncio.gather(*tasks)


async def test_a_dead_servers_requests_go_on_elsewhere_from_the_same_tokens_and_seed() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        asked = asyncio.Event()

        async def hang(body: dict[str, Any]) -> None:
            asked.set()
            await asyncio.Event().wait()

        first.on_generate = hang
        task = asyncio.create_task(ask(engine, seed=41))
        await asked.wait()
        await first.die()
        assert (await task).token_ids == (42, 43, 44, 45)
        keys = ("token_ids", "sampling_params")
        assert [first.bodies[0][key] for key in keys] == [second.bodies[0][key] for key in keys]
        assert not is_up(engine, 0)
        # It is back: with the present weights, and only then used again.
        first.on_generate = lambda body: None
        await first.start()
        await eventually(lambda: is_up(engine, 0))
        await asyncio.gather(*(ask(engine, name=f"t{i}") for i in range(4)))
        assert len(first.bodies) > 1


async def test_a_server_that_comes_back_gets_the_present_weights_first() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.hold()
        await engine.install(Path("/weights/3"), 3)
        engine.admit((1, 2), lambda scores: None if scores == (-3.0,) else f"it says {scores}")
        await first.die()
        await ask(engine)
        first.version, first.loaded = "default", []  # a fresh start
        first.scores = lambda version, place: -3.0 if version == "3" else -1.0
        await first.start()
        await eventually(lambda: is_up(engine, 0))
        assert (first.version, first.loaded) == ("3", ["/weights/3"])


async def test_a_server_that_comes_back_with_other_weights_stays_out() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.hold()
        await engine.install(Path("/weights/3"), 3)
        engine.admit((1, 2), lambda scores: None if scores == (-3.0,) else f"it says {scores}")
        await first.die()
        await ask(engine)
        await first.start()
        await eventually(lambda: first.calls.count("/collective_rpc") > 1)  # loaded again, in vain
        await eventually(lambda: engine._members[0].failure == "after its return it says (-1.0,)")
        assert not is_up(engine, 0)


async def test_without_files_a_server_that_comes_back_waits_for_the_next_transfer() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.hold()
        await engine.install(None, 1)
        engine.admit()
        await first.die()
        await ask(engine)
        first.version = "default"
        await first.start()
        await eventually(lambda: engine._members[0].stale)
        assert not is_up(engine, 0)
        assert engine.targets() == [(first.address, 2), (second.address, 2)]
        await engine.hold()
        await engine.install(None, 2)
        engine.admit()
        assert is_up(engine, 0)


async def test_an_error_of_the_server_is_tried_elsewhere_and_a_refusal_is_not() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        first.on_generate = lambda body: (500, {"error": {"message": "EngineCore encountered an issue"}})
        assert (await ask(engine)).token_ids == (8, 9, 10, 11)
        second.on_generate = lambda body: (400, {"error": {"message": "too long"}})
        first.on_generate = second.on_generate
        with pytest.raises(EngineError, match=r"failed 1 times: .*status 400: too long"):
            await ask(engine)
        assert is_up(engine, 1)


async def test_out_of_memory_halves_what_a_server_gets(caplog: pytest.LogCaptureFixture) -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        running = most = 0
        full = asyncio.Event()

        async def bounded(body: dict[str, Any]) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                if running == 8:
                    full.set()
                    return 500, {"error": {"message": "CUDA out of memory. Tried to allocate 2 GiB"}}
                if not full.is_set():
                    await full.wait()
                await asyncio.sleep(0.01)
                return None
            finally:
                running -= 1

        server.on_generate = bounded
        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*(ask(engine, name=f"t{i}") for i in range(8)))
            assert most == 8
            assert f"{server.address} ran out of memory: from now on at most 4 requests at a time" in caplog.text
            most = 0
            await asyncio.gather(*(ask(engine, name=f"u{i}") for i in range(20)))
        assert most == 4
        assert is_up(engine, 0)


async def test_a_slow_server_gets_less_and_stays() -> None:
    async def slow(body: dict[str, Any]) -> None:
        await asyncio.sleep(0.2)

    async def play(engine: VLLMEngine, player: int) -> None:
        for turn in range(10):
            await ask(engine, name=f"{player}-{turn}")

    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        first.on_generate = slow
        await asyncio.gather(*(play(engine, player) for player in range(8)))
        assert len(first.bodies) + len(second.bodies) == 80
        assert 4 <= len(first.bodies) < len(second.bodies) / 2
        assert is_up(engine, 0)
        assert is_up(engine, 1)


async def test_a_request_that_fails_everywhere_says_how_often_and_why() -> None:
    async with fakes(CODEC, 2) as servers, opened(servers, request_retries=2) as engine:
        for server in servers:
            server.on_generate = lambda body: (503, b"busy")
        with pytest.raises(EngineError, match=r"request t-0 failed 3 times: .*status 503: 'busy'"):
            await ask(engine)
        for server in servers:
            server.on_generate = lambda body: None
        await eventually(lambda: is_up(engine, 0) and is_up(engine, 1))


async def test_a_refused_version_of_weights_is_garbage_after_an_update() -> None:
    async with fakes(CODEC) as (server,), opened([server], request_retries=0) as engine:
        await engine.hold()
        await engine.install(Path("/weights/3"), 3)
        engine.admit()
        server.on_generate = lambda body: (200, {"choices": [sampled([1, 2, 3, 4], version="2")]})
        with pytest.raises(EngineError, match=r"tokens of versions \[2\] to a request of version 3"):
            await ask(engine)


# -- the cache ------------------------------------------------------------------------------------------------------


def told(used: float, *, preemptions: int = 0, tokens: int = 1600) -> str:
    labels = 'engine="0",model_name="policy"'
    return "\n".join(
        [
            f"vllm:kv_cache_usage_perc{{{labels}}} {used}",
            f"vllm:num_preemptions_total{{{labels}}} {preemptions}.0",
            f'vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="{tokens}"}} 1.0',
        ]
    )


async def test_the_cache_is_as_full_as_that_of_the_fullest_server() -> None:
    async with fakes(CODEC, 3) as servers, opened(servers) as engine:
        assert await engine.cache_use() is None
        servers[0].metrics, servers[1].metrics = told(0.2, preemptions=2), told(0.7, preemptions=1, tokens=800)
        servers[2].metrics = "vllm:kv_cache_usage_perc 0.9"  # tells half of it
        assert await engine.cache_use() == CacheUse(tokens=2400, used=0.7, preemptions=3)
        await servers[1].die()
        assert await engine.cache_use() == CacheUse(tokens=1600, used=0.2, preemptions=2)


async def test_a_stuck_request_goes_elsewhere_after_its_deadline() -> None:
    async def stuck(body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with fakes(CODEC, 2) as (first, second), opened([first, second], request_deadline=0.2) as engine:
        first.on_generate = stuck
        assert (await ask(engine)).token_ids == (8, 9, 10, 11)
        assert (first.broken, len(second.bodies)) == (1, 1)


async def test_a_trajectorys_deadline_and_a_cancellation_abort_the_request() -> None:
    async def stuck(body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.on_generate = stuck
        with pytest.raises(TimeoutError):
            await ask(engine, seconds=0.1)
        await eventually(lambda: server.broken == 1)
        task = asyncio.create_task(ask(engine))
        await eventually(lambda: len(server.bodies) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: server.broken == 2)
        assert is_up(engine, 0)
        assert engine._balancer.loads[0].tokens == engine._balancer.loads[0].requests == 0


async def test_no_server_left_ends_the_run_and_not_the_trajectory() -> None:
    async with fakes(CODEC, 2) as servers, opened(servers, outage_deadline=0.5) as engine:
        for server in servers:
            await server.die()
        with pytest.raises(WorldError, match=r"no vLLM server works .*outage_deadline=0.5.*cannot be reached"):
            await ask(engine)


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "running"), [("recomputed", "true"), ("kept", "false")])
async def test_weights_change_while_requests_are_held(kv: str, running: str) -> None:
    async with fakes(CODEC, 2) as servers, opened(servers, kv=kv) as engine:
        await ask(engine, name="before")
        await engine.hold()
        waiting = asyncio.create_task(ask(engine, name="new"))
        await engine.install(Path("/weights/1"), 1)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.admit()
        assert (await waiting).version_spans == ((1, 4),)
        for server in servers:
            assert server.controls_called()[-5:] == [
                "/pause?mode=keep&clear_cache=false",
                "/collective_rpc",
                "/update_weight_version",
                f"/reset_prefix_cache?reset_running_requests={running}",
                "/resume",
            ]
        salts = [body["cache_salt"] for server in servers for body in server.bodies]
        assert len(set(salts)) == 2  # prefixes of one version are never those of another


async def test_a_request_that_runs_while_weights_change_carries_both_versions() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 4}]

        async def across(body: dict[str, Any]) -> Any:
            await asyncio.sleep(0.05)
            await server.awake.wait()
            return 200, {"choices": [sampled([1, 2, 3, 4], weight_versions=spans)]}

        server.on_generate = across
        task = asyncio.create_task(ask(engine))
        await eventually(lambda: len(server.bodies) == 1)
        await engine.hold()
        await engine.install(Path("/weights/1"), 1)
        engine.admit()
        assert (await task).version_spans == ((0, 1), (1, 3))


async def test_servers_sleep_while_the_trainer_has_the_gpus() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        await engine.sleep()
        await engine.hold()
        await engine.install(None, 1)
        engine.admit()
        assert server.controls_called()[-6:] == [
            "/sleep?level=2",
            "/wake_up?tags=weights",
            "/wake_up?tags=kv_cache",
            "/update_weight_version",
            "/reset_prefix_cache?reset_running_requests=true",
            "/resume",
        ]
        assert (await ask(engine)).version_spans == ((1, 4),)


async def test_a_server_that_dies_while_weights_change_is_left_behind() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.hold()
        await first.die()
        await engine.install(Path("/weights/1"), 1)
        engine.admit()
        assert (await ask(engine)).version_spans == ((1, 4),)
        assert await engine.health() == f"vLLM 0.32.0, 1 servers, 1 down: {second.address}; version 1"
        await second.die()
        with pytest.raises(WorldError, match="no vLLM server is left to take the weights"):
            await engine.hold()
