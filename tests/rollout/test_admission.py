"""New trajectories wait for room in the engine's cache, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rollout.fakes import ScriptedEnvironment, ScriptedEpisode, byte_codec, ends, goes_on, problem
from rollout.simulation import run_virtual

from agentrl.rollout.driver import AdmissionControl, Driver
from agentrl.rollout.engines.base import CacheUse, Completion, Sampling
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group

CODEC = byte_codec()
SPEED = 10  # tokens a second of each request


class GrowingEngine:
    """Requests grow by 10 tokens a second; where the cache is full the youngest loses what it has and starts again.

    Every turn has as many tokens as its trajectory's sample number says. ``tells``: how full the cache is.
    """

    def __init__(self, capacity: int, length: Callable[[int], int], *, tells: bool = True) -> None:
        self._capacity = capacity
        self._length = length
        self._tells = tells
        self._held: dict[str, int] = {}
        self.playing: set[str] = set()
        self.most = 0
        self.fullest = 0.0
        self.preemptions = 0

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, *, trajectory_id: str, **others: Any
    ) -> Completion:
        self.playing.add(trajectory_id)
        self.most = max(self.most, len(self.playing))
        tokens, sampled = self._length(int(trajectory_id[-6:])), 0
        self._hold(trajectory_id, len(token_ids))
        while sampled < tokens:
            await asyncio.sleep(1.0)
            if trajectory_id not in self._held:
                sampled = 0  # preempted
            else:
                sampled += SPEED
            self._hold(trajectory_id, len(token_ids) + sampled)
        self._held.pop(trajectory_id, None)
        return Completion(
            token_ids=(97,) * tokens,
            log_probs=(-0.5,) * tokens,
            finish_reason="stop",
            version_spans=((0, tokens),),
        )

    def _hold(self, name: str, tokens: int) -> None:
        self._held[name] = tokens
        while sum(self._held.values()) > self._capacity:
            self._held.pop(next(reversed(self._held)))
            self.preemptions += 1
        self.fullest = max(self.fullest, sum(self._held.values()) / self._capacity)

    def release(self, trajectory_id: str) -> None:
        self.playing.discard(trajectory_id)

    async def cache_use(self) -> CacheUse | None:
        if not self._tells:
            return None
        used = sum(self._held.values()) / self._capacity
        return CacheUse(tokens=self._capacity, used=used, preemptions=self.preemptions)


def length(sample: int) -> int:
    return 300 + 37 * sample % 300


async def play(
    engine: GrowingEngine,
    *,
    count: int = 240,
    turns: int = 2,
    length: Callable[[int], int] = length,
    **changes: Any,
) -> tuple[float, Driver]:
    """One group of ``count`` trajectories: how long it took."""
    settings = RolloutSettings(
        **{"max_prompt_tokens": 100, "max_turn_tokens": 3_900, "max_response_tokens": 3_900, **changes}
    )
    environment = ScriptedEnvironment(lambda *_: ScriptedEpisode([*[goes_on("E")] * (turns - 1), ends()], complete=""))
    driver = Driver(environment=environment, engine=engine, codec=CODEC, settings=settings, seed=0)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    async for group in driver.play_groups([Group(index=0, problem=problem())], step=0, group_size=count):
        assert [item.model_tokens for item in group.trajectories] == [turns * length(i) for i in range(count)]
    assert len(asyncio.all_tasks()) == 1
    return loop.time(), driver


def test_running_trajectories_are_not_preempted() -> None:
    """240 trajectories that end with 600 to 1200 tokens; 10 of the longest possible fit, about 40 of these."""
    blind, careful, timid = (GrowingEngine(40_000, length, tells=tells) for tells in (False, True, True))
    run_virtual(play(blind))
    seconds, driver = run_virtual(play(careful))
    slowest, _ = run_virtual(play(timid, concurrency=10))
    assert (blind.most, timid.most) == (240, 10)
    assert blind.preemptions > 1000
    assert careful.preemptions == timid.preemptions == 0
    assert careful.fullest > 0.9
    assert 40 <= careful.most <= 80
    assert seconds < 0.3 * slowest
    metrics = driver.metrics()
    assert metrics["rollout/preemptions"] == 0
    assert metrics["rollout/kv_use_max"] == pytest.approx(careful.fullest, abs=0.02)
    assert metrics["rollout/concurrency_limit_min"] == 10


def test_preemptions_are_counted_and_take_places_away() -> None:
    """The longest come last, so what the first were like misleads."""
    engine = GrowingEngine(40_000, lambda sample: 300 if sample < 40 else 1500)
    _, driver = run_virtual(play(engine, length=lambda sample: 300 if sample < 40 else 1500))
    metrics = driver.metrics()
    assert metrics["rollout/preemptions"] == engine.preemptions > 0
    assert metrics["rollout/concurrency_limit"] < engine.most


def test_as_many_as_fit_whatever_their_length_always_run() -> None:
    engine = GrowingEngine(40_000, length)

    async def full() -> CacheUse:
        return CacheUse(tokens=40_000, used=1.0, preemptions=0)

    engine.cache_use = full  # type: ignore[method-assign]
    run_virtual(play(engine, count=30))
    assert engine.most == 10
    assert engine.preemptions == 0


@pytest.mark.parametrize(("concurrency", "most"), [(1024, 30), (7, 7)])
def test_an_engine_that_tells_nothing_gets_what_is_set(concurrency: int, most: int) -> None:
    engine = GrowingEngine(1_000_000, length, tells=False)
    run_virtual(play(engine, count=30, concurrency=concurrency))
    assert engine.most == most


def test_the_setting_is_the_most_that_run() -> None:
    engine = GrowingEngine(40_000, length)
    run_virtual(play(engine, concurrency=15))
    assert engine.most == 15


def test_how_full_the_cache_may_be_is_a_setting() -> None:
    engines = [GrowingEngine(40_000, length) for _ in range(2)]
    for engine, kv_high_watermark in zip(engines, (0.4, 0.9), strict=True):
        run_virtual(play(engine, kv_high_watermark=kv_high_watermark))
    assert engines[0].most < 0.7 * engines[1].most


def test_turns_in_rounds_wait_for_nobody_outside() -> None:
    """With ``deterministic`` every player takes part in every round."""

    async def play_in_rounds() -> None:
        environment = ScriptedEnvironment(lambda *_: ScriptedEpisode([ends()], complete=""))
        settings = RolloutSettings(max_prompt_tokens=100, max_turn_tokens=900, max_response_tokens=900)
        driver = Driver(
            environment=environment,
            engine=GrowingEngine(5_000, length),  # type: ignore[arg-type]
            codec=CODEC,
            settings=settings,
            seed=0,
            deterministic=True,
        )
        async for group in driver.play_groups([Group(index=0, problem=problem())], step=0, group_size=8):
            assert len(group.trajectories) == 8
        assert driver.metrics() == {}

    run_virtual(play_in_rounds())


# -- the gate itself ------------------------------------------------------------------------------------------------


def gate(look: Callable[[], Awaitable[CacheUse | None]], ceiling: int = 100) -> AdmissionControl:
    return AdmissionControl(look, max_trajectories=ceiling, max_tokens=100, kv_high_watermark=0.9)


async def full() -> CacheUse:
    return CacheUse(tokens=200, used=0.95, preemptions=0)


async def test_first_come_first_served_and_a_cancelled_one_takes_no_place() -> None:
    admission, order = gate(full), []
    inside, leave = asyncio.Event(), asyncio.Event()

    async def visit(name: int) -> None:
        async with admission:
            order.append(name)
            if len(order) == 2:
                inside.set()
            await leave.wait()

    visits = [asyncio.create_task(visit(name)) for name in range(8)]
    await asyncio.wait_for(inside.wait(), 60.0)
    assert order == [0, 1]
    visits[2].cancel()
    leave.set()
    await asyncio.gather(*visits, return_exceptions=True)
    assert order == [0, 1, 3, 4, 5, 6, 7]


async def test_one_that_is_let_in_and_cancelled_at_once_gives_its_place_back() -> None:
    admission = gate(full)
    first = [await admission.__aenter__() for _ in range(1)]
    assert first == [None]
    await admission.__aenter__()
    third = asyncio.create_task(admission.__aenter__())
    fourth = asyncio.create_task(admission.__aenter__())
    await asyncio.sleep(0)
    await admission.__aexit__()  # the third's place; it has not run yet
    third.cancel()
    await asyncio.wait_for(fourth, 5.0)
    assert third.cancelled()
    for _ in range(2):
        await admission.__aexit__()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_bug_in_looking_reaches_those_who_wait_and_those_who_come() -> None:
    async def look() -> CacheUse:
        raise ZeroDivisionError("a bug")

    admission = gate(look)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            async with asyncio.timeout(5.0), admission:
                pass


def test_the_limit_follows_the_cache() -> None:
    """A look every 2 s; 10 of the longest fit; trajectories live 4 s; after 8 s they are known to have 40 tokens."""
    uses = [0.3, 0.3, 0.3, 0.3, 0.5, 0.5, 0.5, 0.95, 0.95, 0.5, 0.5]

    async def scenario() -> list[float]:
        left = iter(uses)

        async def look() -> CacheUse:
            return CacheUse(tokens=1000, used=next(left), preemptions=0)

        admission = gate(look)
        visits = [asyncio.create_task(admission.__aenter__()) for _ in range(100)]
        limits = []
        for place in range(len(uses)):
            await asyncio.sleep(0.1)
            limits.append(admission.metrics()["rollout/concurrency_limit"])
            if place == 3:
                for _ in range(10):
                    admission.record_trajectory_end(40, 4.0)
            await asyncio.sleep(1.9)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        for _ in range(sum(not visit.cancelled() for visit in visits)):
            await admission.__aexit__()
        return limits

    # 0.9 * 1000 / 40 = 22; a quarter more after half a life; three quarters of the 33 in flight; and more again, for
    # all 33 are still there.
    assert run_virtual(scenario()) == [10, 10, 10, 10, 22, 27, 33, 24, 24, 30, 37]
