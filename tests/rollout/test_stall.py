"""When a server counts as stalled: in virtual time, against a server whose tokens are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from rollout.simulation import run_virtual

from agentrl.rollout.engines.pooled_server import StallDetector
from agentrl.rollout.engines.replica import TooSlowError, UnreachableError


def ended_after(
    tokens: Callable[[float], int | None], *, held: tuple[float, float] = (0.0, 0.0), lasts: float
) -> float:
    """When a request ended that takes ``lasts`` seconds; negative if its server was found stalled.

    ``tokens`` tells what the server has computed at a time; the gate is closed from ``held[0]`` to ``held[1]``.
    """

    async def told() -> int | None:
        return tokens(asyncio.get_running_loop().time())

    async def play() -> float:
        loop = asyncio.get_running_loop()
        gate = asyncio.Event()
        gate.set()
        loop.call_at(held[0], gate.clear)
        loop.call_at(held[1], gate.set)
        detector = StallDetector("here", told, gate, stall_deadline=300.0)
        try:
            async with detector.watch_request():
                await asyncio.sleep(lasts)
        except TooSlowError:
            return -loop.time()
        finally:
            assert len(asyncio.all_tasks()) <= 2
            await detector.close()
        return loop.time()

    return run_virtual(play())


def test_a_request_lasts_as_long_as_its_server_computes() -> None:
    assert ended_after(lambda now: int(now / 200), lasts=86_400.0) == 86_400.0


def test_a_server_that_computes_nothing_is_stalled_after_its_stall_deadline() -> None:
    assert -330.0 <= ended_after(lambda now: 7, lasts=86_400.0) <= -300.0
    assert -1330.0 <= ended_after(lambda now: min(int(now), 1000), lasts=86_400.0) <= -1300.0


def test_a_server_that_does_not_tell_is_never_stalled() -> None:
    assert ended_after(lambda now: None, lasts=86_400.0) == 86_400.0


def test_a_server_that_does_not_answer_is_stalled_whether_it_told_before_or_not() -> None:
    def gone(before: int | None) -> Callable[[float], int | None]:
        def tokens(now: float) -> int | None:
            if now < 500.0:
                return before
            raise UnreachableError("gone")

        return tokens

    assert -530.0 >= ended_after(gone(None), lasts=86_400.0) >= -860.0
    assert -300.0 >= ended_after(gone(7), lasts=86_400.0) >= -330.0


def test_one_look_that_fails_is_no_sign_of_anything() -> None:
    def tokens(now: float) -> int:
        if int(now / 15) % 2:
            raise UnreachableError("busy")
        return 7

    assert -330.0 <= ended_after(tokens, lasts=86_400.0) <= -300.0


def test_time_in_which_weights_change_does_not_count() -> None:
    assert ended_after(lambda now: 7, held=(100.0, 5000.0), lasts=5250.0) == 5250.0
    assert -5330.0 <= ended_after(lambda now: 7, held=(100.0, 5000.0), lasts=6000.0) <= -5300.0


def test_a_request_that_follows_at_once_is_watched_afresh() -> None:
    async def play() -> float:
        gate = asyncio.Event()
        gate.set()

        async def told() -> int:
            return 7

        detector = StallDetector("here", told, gate, stall_deadline=300.0)
        for _ in range(20):
            async with detector.watch_request():
                await asyncio.sleep(200.0)
        await detector.close()
        return asyncio.get_running_loop().time()

    assert run_virtual(play()) == 4000.0


def test_a_bug_in_looking_is_raised() -> None:
    def tokens(now: float) -> int:
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError, match="bug"):
        ended_after(tokens, lasts=86_400.0)
