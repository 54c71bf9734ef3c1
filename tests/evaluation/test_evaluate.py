"""Scores of finished groups: excluded rollouts are left out, and a WorldError is raised if all are excluded."""

from __future__ import annotations

import pytest

from agentrl.errors import WorldError
from agentrl.evaluation.during_training import score_groups
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem


def group(index: int, *rewards: float | None) -> Group:
    """Build a group with these rewards. None is an infrastructure failure."""
    problem = Problem(id=f"p{index}", statement="?", answer="1", source="toy", family=f"family{index % 2}")
    trajectories = tuple(
        Trajectory(
            problem=problem,
            step=3,
            group=index,
            sample=sample,
            prompt_ids=(1,),
            segments=(
                Segment(
                    origin="model",
                    token_ids=(2,),
                    log_probs=(-0.5,),
                    version_spans=((0, 1),),
                    reward=reward or 0.0,
                    text="x",
                ),
            ),
            ended=Ended.INFRASTRUCTURE_FAILURE if reward is None else Ended.ANSWERED,
        )
        for sample, reward in enumerate(rewards)
    )
    return Group(problem=problem, index=index, trajectories=trajectories)


def test_failures_outside_the_policy_are_left_out_and_counted() -> None:
    report = score_groups([group(0, 1.0, 0.0), group(1, 1.0, None)], step=3, samples=2)
    assert report.overall.mean == 0.75
    assert report.excluded == 1
    assert {name: score.mean for name, score in report.families.items()} == {"family0": 0.5, "family1": 1.0}
    assert report.metrics()["eval/avg_at_k"] == 0.75


def test_nothing_but_failures_is_an_error_of_the_world() -> None:
    with pytest.raises(WorldError, match="every rollout of 2 problems failed for reasons outside the policy"):
        score_groups([group(0, None, None), group(1, None)], step=3, samples=2)
