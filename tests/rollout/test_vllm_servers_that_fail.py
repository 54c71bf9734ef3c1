"""Servers that die, come back, fill up and change their weights, against fakes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from rollout.fake_vllm import fakes, sampled
from rollout.vllm_support import CODEC, PROMPT, ask, eventually, is_up, opened

from agentrl.errors import WorldError
from agentrl.rollout.engines.base import CacheUse, EngineError
from agentrl.rollout.engines.replica import ServerClient
from agentrl.rollout.engines.server_pool import ServerEngine

pytestmark = pytest.mark.slow

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


async def scores_minus_three(replica: ServerClient) -> str | None:
    scores = await replica.score((1, 2), salt="look")
    return None if scores == (-3.0,) else f"it says {scores}"


async def test_a_server_that_comes_back_gets_the_present_weights_first() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.pause()
        await engine.install(Path("/weights/3"), 3)
        engine.resume(scores_minus_three)
        await first.die()
        await ask(engine)
        first.version, first.loaded = "default", []  # a fresh start
        first.scores = lambda version, place: -3.0 if version == "3" else -1.0
        await first.start()
        await eventually(lambda: is_up(engine, 0))
        assert (first.version, first.loaded) == ("3", ["/weights/3"])


async def test_a_server_that_comes_back_with_other_weights_stays_out() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.pause()
        await engine.install(Path("/weights/3"), 3)
        engine.resume(scores_minus_three)
        await first.die()
        await ask(engine)
        await first.start()
        await eventually(lambda: first.calls.count("/collective_rpc") > 1)  # loaded again, in vain
        await eventually(lambda: engine._servers[0].failure == "after recovery: it says (-1.0,)")
        assert not is_up(engine, 0)


async def test_without_files_a_server_that_comes_back_waits_for_the_next_transfer() -> None:
    async with fakes(CODEC, 2) as (first, second), opened([first, second]) as engine:
        await engine.pause()
        await engine.install(None, 1)
        engine.resume()
        await first.die()
        await ask(engine)
        first.version = "default"
        await first.start()
        await eventually(lambda: engine._servers[0].lacks_weights)
        assert not is_up(engine, 0)
        responding = [
            (server.address, server.identity and server.identity.workers) for server in engine.responding_servers
        ]
        assert responding == [(first.address, 2), (second.address, 2)]
        await engine.pause()
        await engine.install(None, 2)
        engine.resume()
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
            assert f"{server.address} ran out of memory: limiting it to 4 concurrent requests" in caplog.text
            most = 0
            await asyncio.gather(*(ask(engine, name=f"u{i}") for i in range(20)))
        assert most == 4
        assert is_up(engine, 0)


async def test_a_slow_server_gets_less_and_stays() -> None:
    async def slow(body: dict[str, Any]) -> None:
        await asyncio.sleep(0.2)

    async def play(engine: ServerEngine, player: int) -> None:
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
        await engine.pause()
        await engine.install(Path("/weights/3"), 3)
        engine.resume()
        server.on_generate = lambda body: (200, {"choices": [sampled([1, 2, 3, 4], version="2")]})
        with pytest.raises(EngineError, match=r"tokens have versions \[2\], but the request has version 3"):
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


def computed(tokens: int) -> str:
    """A server's metrics when it has computed so many tokens."""
    return f'vllm:prompt_tokens_total{{engine="0"}} 3.0\nvllm:generation_tokens_total{{engine="0"}} {tokens}.0'


@pytest.mark.parametrize("wedged", [False, True])
async def test_the_requests_of_a_server_that_computes_nothing_go_elsewhere(wedged: bool) -> None:
    """It answers to everything else, or to nothing at all."""

    async def stuck(body: dict[str, Any]) -> None:
        first.answering = not wedged
        await asyncio.Event().wait()

    async with fakes(CODEC, 2) as (first, second), opened([first, second], stall_deadline=0.2) as engine:
        first.on_generate, first.metrics = stuck, computed(5)
        answers = [await ask(engine, name="one"), *await asyncio.gather(*(ask(engine, name=f"{n}") for n in range(4)))]
        assert [answer.token_ids for answer in answers] == [(8, 9, 10, 11)] * 5
        assert (first.broken >= 1, len(second.bodies) >= 5) == (True, True)


@pytest.mark.parametrize("tells", [True, False])
async def test_slow_is_not_dead(tells: bool) -> None:
    """A turn that takes many times the deadline is waited for, as short ones are, while its server gets tokens out."""

    async def slow(body: dict[str, Any]) -> None:
        for _ in range(body["sampling_params"]["max_tokens"]):
            await asyncio.sleep(0.05)
            tokens[0] += 1
            server.metrics = computed(tokens[0]) if tells else ""

    tokens = [0]
    async with fakes(CODEC) as (server,), opened([server], stall_deadline=1.0) as engine:
        server.on_generate = slow
        long, short = await asyncio.gather(ask(engine, max_tokens=60), ask(engine, name="short", max_tokens=1))
        assert (len(long.token_ids), len(short.token_ids)) == (60, 1)
        assert (server.broken, len(server.bodies), is_up(engine, 0)) == (0, 2, True)


async def test_no_token_comes_while_weights_change_and_nobody_is_to_blame() -> None:
    async with fakes(CODEC) as (server,), opened([server], stall_deadline=0.2) as engine:
        server.metrics = computed(5)
        server.awake.clear()
        waiting = asyncio.create_task(ask(engine))
        await eventually(lambda: len(server.bodies) == 1)
        await engine.pause()
        looks = server.calls.count("/metrics")
        await asyncio.sleep(0.4)  # twice what is too long for a server that could compute
        assert server.calls.count("/metrics") <= looks + 1
        await engine.install(Path("/weights/1"), 1)
        engine.resume()
        assert len((await waiting).token_ids) == 4
        assert (server.broken, len(server.bodies), is_up(engine, 0)) == (0, 1, True)


async def test_a_cancellation_aborts_the_request() -> None:
    async def stuck(body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.on_generate = stuck
        for number in (1, 2):
            task = asyncio.create_task(ask(engine))
            await eventually(lambda number=number: len(server.bodies) == number)  # type: ignore[misc]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda number=number: server.broken == number)  # type: ignore[misc]
        assert is_up(engine, 0)
        assert engine._servers[0].load.tokens == engine._servers[0].load.requests == 0


async def test_no_server_left_ends_the_run_and_not_the_trajectory() -> None:
    async with fakes(CODEC, 2) as servers, opened(servers, outage_deadline=0.5) as engine:
        for server in servers:
            await server.die()
        with pytest.raises(WorldError, match=r"no vLLM server is available .*outage_deadline=0.5.*cannot be reached"):
            await ask(engine)


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "running"), [("recomputed", "true"), ("kept", "false")])
async def test_weights_change_while_requests_are_held(kv: str, running: str) -> None:
    async with fakes(CODEC, 2) as servers, opened(servers, kv=kv) as engine:
        await ask(engine, name="before")
        await engine.pause()
        waiting = asyncio.create_task(ask(engine, name="new"))
        await engine.install(Path("/weights/1"), 1)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.resume()
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
        await engine.pause()
        await engine.install(Path("/weights/1"), 1)
        engine.resume()
        assert (await task).version_spans == ((0, 1), (1, 3))


async def test_servers_sleep_while_the_trainer_has_the_gpus() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        await engine.sleep()
        await engine.pause()
        await engine.install(None, 1)
        engine.resume()
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
    async with fakes(CODEC, 2) as (first, second), opened([first, second], outage_deadline=0.5) as engine:
        await engine.pause()
        await first.die()
        await engine.install(Path("/weights/1"), 1)
        engine.resume()
        assert (await ask(engine)).version_spans == ((1, 4),)
        assert await engine.health() == (
            f"vLLM 0.32.0, 1 servers, 1 down: {second.address}; logits in float32; version 1"
        )
        await second.die()
        with pytest.raises(WorldError, match=r"no vLLM server is available .*outage_deadline=0.5.*cannot be reached"):
            await engine.pause()


@pytest.mark.parametrize("moment", ["before", "paused", "installed"])
async def test_the_only_server_is_waited_for_and_gets_the_weights(moment: str) -> None:
    """It dies before the weights change, while it is paused, and before it is verified."""

    async def die_and_return() -> None:
        await server.die()
        server.version, server.loaded = "default", []  # a fresh start
        returning.append(asyncio.get_running_loop().call_later(0.3, lambda: returns.append(create(server.start()))))

    create, returning, returns = asyncio.create_task, list[asyncio.TimerHandle](), list[asyncio.Task[None]]()
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.scores = lambda version, place: -3.0 if version == "2" else -1.0
        await engine.pause()
        await engine.install(Path("/weights/1"), 1)
        engine.resume()
        if moment == "before":
            await die_and_return()
        await engine.pause()
        if moment == "paused":
            await die_and_return()
        waiting = asyncio.create_task(ask(engine))
        await engine.install(Path("/weights/2"), 2)
        if moment == "installed":
            await die_and_return()
        assert await engine.find_problems(scores_minus_three) == []
        assert not waiting.done()  # nothing is sampled before the weights are verified
        engine.resume(scores_minus_three)
        assert (await waiting).version_spans == ((2, 4),)
        assert (server.version, server.loaded[-1]) == ("2", "/weights/2")
