"""The two gates of the driver: one for reproducible batches, one for a responsive event loop."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.rollout.policy import EventLoopThrottle, TurnBarrier


async def drain() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_gate_opens_when_all_wait_in_the_order_of_their_names() -> None:
    rounds, passed = TurnBarrier(3), []

    async def player(name: str) -> None:
        await rounds.wait_for_all(name)
        passed.append(name)

    tasks = [asyncio.create_task(player(name)) for name in ("c", "a")]
    await drain()
    assert passed == []
    await player("b")
    await asyncio.gather(*tasks)
    assert passed == ["a", "b", "c"]


async def test_who_leaves_is_not_waited_for() -> None:
    rounds = TurnBarrier(2)
    task = asyncio.create_task(rounds.wait_for_all("a"))
    await drain()
    assert not task.done()
    rounds.remove_participant()
    await task


async def test_who_is_cancelled_at_the_gate_does_not_count_as_waiting() -> None:
    rounds = TurnBarrier(2)
    gone = asyncio.create_task(rounds.wait_for_all("a"))
    await drain()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    stays = asyncio.create_task(rounds.wait_for_all("b"))
    await drain()
    assert not stays.done()
    again = asyncio.create_task(rounds.wait_for_all("a"))
    await asyncio.gather(stays, again)


async def test_few_pass_in_one_iteration_and_all_in_order() -> None:
    throttle, passed, iterations = EventLoopThrottle(), [], []
    iteration = 0

    async def player(number: int) -> None:
        await throttle.wait_for_admission()
        passed.append(number)
        iterations.append(iteration)

    tasks = [asyncio.create_task(player(number)) for number in range(100)]
    while not all(task.done() for task in tasks):
        iteration += 1
        await asyncio.sleep(0)
    assert passed == list(range(100))
    assert max(iterations.count(number) for number in set(iterations)) == 16


async def test_a_free_gate_does_not_suspend() -> None:
    throttle = EventLoopThrottle()
    with pytest.raises(StopIteration):
        throttle.wait_for_admission().send(None)


async def test_who_is_cancelled_at_the_gate_holds_nobody_up() -> None:
    throttle = EventLoopThrottle()
    tasks = [asyncio.create_task(throttle.wait_for_admission()) for _ in range(60)]
    await asyncio.sleep(0)
    for task in tasks[16:40]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False] * 16 + [True] * 24 + [False] * 20
