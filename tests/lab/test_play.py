"""How often the problems of a measurement are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from agentrl.lab.play import play_enough
from agentrl.rollout.work_queue import RolloutRequest
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem


class FakeDriver:
    """Of every six trajectories of a problem, the first ``data[problem]`` are data; the others end by a void turn."""

    def __init__(self, data: dict[str, int]) -> None:
        self.data = data
        self.played: list[tuple[int, list[int], int]] = []

    async def run(
        self, requests: Sequence[RolloutRequest], *, step: int, group_size: int
    ) -> AsyncGenerator[Group, None]:
        self.played.append((step, [item.index for item in requests], group_size))
        for request in reversed(requests):
            rollouts = tuple(
                Trajectory(
                    problem=request.problem, step=step, group=request.index, sample=sample, prompt_ids=(1,),
                    segments=(Segment(origin="model", token_ids=(2,), text="", log_probs=(-1.0,),
                                      version_spans=((0, 1),), reward=float(sample % 2)),),
                    ended=Ended.ANSWERED if sample < self.data[request.problem.id] else Ended.VOID_TURN,
                )
                for sample in range(group_size)
            )  # fmt: skip
            yield Group(problem=request.problem, index=request.index, trajectories=rollouts)


@pytest.mark.parametrize(
    ("data", "rounds", "found"),
    [
        ({"a": 6, "b": 5}, [[3, 4]], [6, 5]),
        ({"a": 6, "b": 4}, [[3, 4], [4]], [6, 8]),
        ({"a": 2, "b": 6}, [[3, 4], [3], [3]], [6, 6]),
        ({"a": 1, "b": 0}, [[3, 4]] * 4, [4, 0]),  # the last round, and too few
    ],
)
def test_a_problem_is_played_until_enough_is_data(
    data: dict[str, int], rounds: list[list[int]], found: list[int]
) -> None:
    driver = FakeDriver(data)
    requests = [
        RolloutRequest(index=index, problem=Problem(id=name, statement="?", answer="1", source="test"))
        for index, name in ((3, "a"), (4, "b"))
    ]
    groups = asyncio.run(play_enough(driver, requests, samples=5))  # type: ignore[arg-type]
    assert driver.played == [(step, numbers, 6) for step, numbers in enumerate(rounds)]
    assert {index: len(group.trajectories) for index, group in groups.items()} == dict(zip((3, 4), found, strict=True))
    for index, group in groups.items():
        assert group.index == index
        assert all(item.ended is Ended.ANSWERED for item in group.trajectories)
        steps = [item.step for item in group.trajectories]
        assert steps == sorted(steps)
