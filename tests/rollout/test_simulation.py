"""The simulated engine and clock of benchmarks/rollout.py, against times computed by hand."""

from __future__ import annotations

import asyncio
import random

import pytest
from rollout.simulation import Hardware, LockStep, SimulatedEngine, run_virtual

from agentrl.rollout.engines.base import Completion, Sampling


def engine(*, together: float = 10.0, alone: float = 10.0, kv: int = 1000) -> SimulatedEngine:
    """The seed of a request is its number of tokens."""
    hardware = Hardware(tokens_per_second=together, request_tokens_per_second=alone, kv_tokens=kv)
    return SimulatedEngine(hardware, lambda seed: seed)


async def turn(
    one: SimulatedEngine, tokens: int, *, begin: float = 0.0, prompt: int = 0, most: int = 1000
) -> tuple[float, Completion]:
    """When it ended, and with what."""
    await asyncio.sleep(begin)
    completion = await one.generate(
        (1,) * prompt,
        Sampling(max_tokens=most),
        trajectory_id="t",
        request_id="r",
        seed=tokens,
    )
    return asyncio.get_running_loop().time(), completion


async def ends(one: SimulatedEngine, *turns: tuple[int, float]) -> list[float]:
    ended = await asyncio.gather(*(turn(one, tokens, begin=begin) for tokens, begin in turns))
    return [when for when, _ in ended]


def test_a_day_takes_no_time() -> None:
    async def wait() -> float:
        await asyncio.sleep(86_400.0 * 3)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == pytest.approx(86_400.0 * 3)


def test_waiting_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no timer is set"):
        run_virtual(asyncio.Event().wait())


def test_requests_share_the_throughput() -> None:
    # Together 5 tokens/s each: the short one has its 20 at 4 s, the long one its last 20 of 40 at 10 a second.
    assert run_virtual(ends(engine(), (20, 0.0), (40, 0.0))) == pytest.approx([4.0, 6.0])
    # The second comes at 2 s, when the first has 20 of 40.
    assert run_virtual(ends(engine(), (40, 0.0), (10, 2.0))) == pytest.approx([5.0, 4.0])


def test_a_request_alone_has_its_own_limit() -> None:
    assert run_virtual(ends(engine(alone=2.0), (20, 0.0), (20, 0.0))) == pytest.approx([10.0, 10.0])


def test_what_the_cache_does_not_hold_waits() -> None:
    assert run_virtual(ends(engine(kv=30), (20, 0.0), (20, 0.0))) == pytest.approx([2.0, 4.0])


def test_a_request_that_gives_up_makes_room() -> None:
    async def play() -> tuple[float, int]:
        one = engine(kv=30)
        second = asyncio.create_task(turn(one, 20, begin=0.5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await turn(one, 20)
        return (await second)[0], one.kv_used

    assert run_virtual(play()) == (pytest.approx(3.0), 0)


def test_turns_are_cut_at_their_limit() -> None:
    ended, completion = run_virtual(turn(engine(), 50, most=30))
    assert (ended, len(completion.token_ids)) == (pytest.approx(3.0), 30)


def test_new_weights_under_a_request_show_in_its_versions() -> None:
    async def play() -> tuple[float, Completion]:
        one = engine()
        task = asyncio.create_task(turn(one, 30))
        await asyncio.sleep(1.0)
        one.pause()
        await asyncio.sleep(5.0)
        one.resume(version=1)
        return await task

    ended, completion = run_virtual(play())
    assert ended == pytest.approx(8.0)
    assert completion.version_spans == ((0, 10), (1, 20))


@pytest.mark.parametrize("seed", range(5))
def test_work_is_conserved(seed: int) -> None:
    """While there is work the engine gives all of its throughput: the last ends at tokens over throughput."""
    numbers = random.Random(seed)
    turns = [(numbers.randint(1, 200), numbers.uniform(0, 0.5)) for _ in range(50)]
    lengths = sum(tokens for tokens, _ in turns)
    one = engine(kv=700)
    begin = min(begin for _, begin in turns)
    assert max(run_virtual(ends(one, *turns))) == pytest.approx(begin + lengths / 10)


def test_a_barrier_opens_when_the_last_has_come_or_left() -> None:
    async def play() -> list[float]:
        loop, barrier = asyncio.get_running_loop(), LockStep()
        for _ in range(3):
            barrier.join()

        async def player(begin: float) -> float:
            await asyncio.sleep(begin)
            await barrier.wait()
            return loop.time()

        waiting = [asyncio.create_task(player(begin)) for begin in (1.0, 4.0)]
        await asyncio.sleep(9.0)
        barrier.leave()
        return [await item for item in waiting]

    assert run_virtual(play()) == [pytest.approx(9.0)] * 2
