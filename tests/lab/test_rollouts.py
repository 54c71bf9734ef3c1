"""How often the problems of a measurement are played."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.lab.results import MeasurementFiles
from agentrl.lab.rollouts import load_lab_problems, sample_until_usable
from agentrl.lab.settings import LabSettings
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem


class FakeDriver:
    """Of every six trajectories of a problem, the first ``data[problem]`` are data; the others end by a void turn."""

    def __init__(self, data: dict[str, int]) -> None:
        self.data = data
        self.played: list[tuple[int, list[int], int]] = []

    async def play_groups(
        self, requests: Sequence[Group], *, step: int, group_size: int
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
        Group(index=index, problem=Problem(id=name, statement="?", answer="1", source="test"))
        for index, name in ((3, "a"), (4, "b"))
    ]
    groups = asyncio.run(sample_until_usable(driver, requests, samples=5))  # type: ignore[arg-type]
    assert driver.played == [(step, numbers, 6) for step, numbers in enumerate(rounds)]
    assert {index: len(group.trajectories) for index, group in groups.items()} == dict(zip((3, 4), found, strict=True))
    for index, group in groups.items():
        assert group.index == index
        assert all(item.ended is Ended.ANSWERED for item in group.trajectories)
        steps = [item.step for item in group.trajectories]
        assert steps == sorted(steps)


def test_another_file_of_problems_is_another_measurement(tmp_path: Path) -> None:
    """Also one with the same names of problems; their number alone may grow."""
    settings = load_settings("simpletir", ["horizon_2"], [])
    labs = []
    for added in (1, 2):
        file = tmp_path / f"{added}.jsonl"
        rows = [{"id": str(n), "problem": f"{n}+{added}", "answer": str(n + added)} for n in range(3)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lab, problems = load_lab_problems(settings, LabSettings(), str(file))
        assert (lab.problems, len(problems)) == (3, 3)
        labs.append(lab)
    files = MeasurementFiles(tmp_path / "kept")
    conditions = [{"problem_file": lab.problem_file} for lab in labs]
    assert files.start_or_continue(conditions[0]) == files.start_or_continue(conditions[0]) == []
    with pytest.raises(
        SettingsError, match=r"contains a measurement with problem_file=\"\w{16}\", but problem_file is now"
    ):
        files.start_or_continue(conditions[1])
    counted = [load_lab_problems(settings, LabSettings(), number)[0].problem_file for number in ("2", "3")]
    assert counted == [None, None]
