"""What waiting does to trajectories: nothing. Long ones and short ones, in virtual time, wherever they have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rollout.fakes import ScriptedEngine, ScriptedEnvironment, ScriptedEpisode, byte_codec, completion, ends, goes_on
from rollout.fakes import problem as toy
from rollout.simulation import run_virtual

from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.base import Completion, EngineError
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.types import Ended, Problem, Step

CODEC = byte_codec()
TURN = completion(CODEC, "aEND")
LENGTHS = range(1, 9)
"""Turns of the trajectories: one of each."""
Wait = Callable[[], Awaitable[Any]]


async def a_second() -> None:
    await asyncio.sleep(1.0)


async def an_hour() -> None:
    await asyncio.sleep(3000.0)


def outage(begins: float, ends: float) -> Wait:
    """What arrives in an outage waits for its end."""

    async def wait() -> None:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0 if not begins <= now < ends else ends - now)

    return wait


def failing(begins: float, ends: float) -> Wait:
    """What arrives in an outage fails; long trajectories meet it, the shortest do not."""

    async def wait() -> None:
        await asyncio.sleep(1.0)
        if begins <= asyncio.get_running_loop().time() < ends:
            raise EngineError("gone")

    return wait


def played(engine: Wait, program: Wait = a_second, **changes: Any) -> dict[int, Trajectory]:
    """A trajectory of each length by its number of turns; every turn waits for ``engine`` and ``program``."""

    async def generate() -> Completion:
        await engine()
        return TURN

    class Episode(ScriptedEpisode):
        async def step(self, action: str) -> Step:
            await program()
            return await super().step(action)

    def episode(problem: Problem, _: int) -> ScriptedEpisode:
        turns = int(problem.id.removeprefix("toy-"))
        return Episode([*(goes_on("E") for _ in range(turns - 1)), ends(reward=1.0)])

    async def play() -> dict[int, Trajectory]:
        driver = Driver(
            environment=ScriptedEnvironment(episode),
            engine=ScriptedEngine(lambda *_: generate()),  # type: ignore[arg-type]
            codec=CODEC,
            settings=RolloutSettings(**{"concurrency": 16, **changes}),
            seed=0,
        )
        requests = [Group(index=turns, problem=toy(turns)) for turns in LENGTHS]
        groups = [group async for group in driver.play_groups(requests, step=0, group_size=1)]
        return {group.index: group.trajectories[0] for group in groups}

    return run_virtual(play())


@pytest.mark.parametrize(
    ("engine", "program"),
    [
        (outage(4.5, 34.5), a_second),
        (outage(4.5, 10_000.0), a_second),  # an outage, or an engine that waits for new weights
        (an_hour, a_second),  # a busy engine
        (a_second, outage(4.5, 3000.0)),
        (a_second, an_hour),  # programs queue at the sandbox
    ],
)
def test_waiting_is_charged_to_nobody(engine: Wait, program: Wait) -> None:
    trajectories = played(engine, program, program_seconds=1.0)
    assert {turns: (one.ended, one.reward, one.turns) for turns, one in trajectories.items()} == {
        turns: (Ended.ANSWERED, 1.0, turns) for turns in LENGTHS
    }


def test_what_an_outage_breaks_is_played_again_or_no_data_and_never_a_reward_of_zero() -> None:
    again = played(failing(4.5, 34.5), retries=20)
    assert {one.ended for one in again.values()} == {Ended.ANSWERED}
    lost = played(failing(4.5, 1e9), retries=1)
    assert [lost[turns].ended for turns in LENGTHS] == [Ended.ANSWERED] * 2 + [Ended.INFRASTRUCTURE_FAILURE] * 6
    assert all(one.is_excluded == (one.reward == 0.0) for one in lost.values())


def test_the_retries_outlast_a_short_outage() -> None:
    async def failing_at_first() -> None:
        if asyncio.get_running_loop().time() < 0.7:
            raise EngineError("gone")
        await asyncio.sleep(1.0)

    assert {one.ended for one in played(failing_at_first).values()} == {Ended.ANSWERED}
