"""Rollout metrics by hand."""

from __future__ import annotations

import math

import pytest
from rollout.fakes import played, problem

from agentrl.rollout.metrics import between_problem_variance_fraction, clustered_reward_stderr, rollout_metrics
from agentrl.trajectory import Group, Segment, Trajectory, TrajectoryError
from agentrl_envs.types import MAX_REWARD, Ended, ToolCall, Verdict

OBSERVATION = Segment(origin="observation", token_ids=(7, 8), text="E")


def group(index: int, *trajectories: Trajectory) -> Group:
    return Group(problem=problem(index), index=index, trajectories=trajectories)


def test_by_hand() -> None:
    calls = (ToolCall(outcome="ok", seconds=0.1), ToolCall(outcome="timeout", seconds=5.0))
    one = played(1.0, tool_calls=calls, seconds=3.0)
    observed = played(0.0, sample=1, tokens=4, ended=Ended.TOKEN_LIMIT, seconds=1.0)
    two = played(0.0, sample=1, segments=(*observed.segments, OBSERVATION, *observed.segments), seconds=1.0)
    failed = played(0.0, group=1, ended=Ended.INFRASTRUCTURE_FAILURE, tokens=5, tool_calls=calls[1:], seconds=9.0)
    three = played(1.0, group=1, sample=1, tokens=6, verdict=Verdict.ANSWER_TIMEOUT)
    metrics = rollout_metrics([group(0, one, two), group(1, failed, three)])
    assert metrics == {
        "groups/issued": 2,
        "groups/infrastructure_failures": 1,
        "reward/count": 3,
        "rollout/ended/answered": 3,
        "rollout/ended/infrastructure_failure": 1,
        "rollout/verdict/answer_timeout": 1,
        "rollout/tool_outcome/ok": 1,
        "rollout/tool_outcome/timeout": 2,
        "reward/mean": pytest.approx(2 / 3),
        # mean 2/3; group sums minus mean times size: 1 - 4/3 and 1 - 2/3.
        "reward/stderr": pytest.approx(math.sqrt(2 * (1 / 9 + 1 / 9)) / 3),
        # groups of means 1/2 and 1: 1/2 within over 1, 2 * (1/6)^2 + (1/3)^2 between over 1, size 3 - 5/3.
        "reward/problem_share": pytest.approx((1 / 6 - 1 / 2) / (1 / 6 + 1 / 3 * 1 / 2)),
        "rollout/sampled_entropy": pytest.approx(0.5),
        "rollout/turns_mean": pytest.approx((1 + 2 + 1) / 3),
        "rollout/turns_max": 2,
        "rollout/tool_calls_mean": pytest.approx(2 / 3),
        "rollout/response_tokens_mean": pytest.approx((2 + 10 + 6) / 3),
        "rollout/model_tokens_mean": pytest.approx((2 + 8 + 6) / 3),
        "rollout/model_tokens": 2 + 8 + 5 + 6,
        "rollout/seconds_max": 9.0,
    }


def test_the_largest_rewards_do_not_overflow() -> None:
    most = [played(sign * MAX_REWARD, group=index) for index, sign in enumerate((1, -1))]
    metrics = rollout_metrics([group(index, one) for index, one in enumerate(most)])
    assert (metrics["reward/mean"], metrics["reward/stderr"]) == (0.0, pytest.approx(1e6))
    with pytest.raises(TrajectoryError, match=r"the reward 1e\+308 is outside -1,000,000 to 1,000,000"):
        played(1e308)


def test_a_share_of_problems_by_hand() -> None:
    def share(*rewards: tuple[float, ...]) -> float:
        return between_problem_variance_fraction(
            [group(i, *(played(r, group=i) for r in part)) for i, part in enumerate(rewards)]
        )

    assert share((0.0, 0.0), (1.0, 1.0)) == 1.0
    assert share((0.0, 1.0), (0.0, 1.0)) == -1.0  # between 0, within 1/2
    # means 1/2 and 1; within 1/2 / 2; between 2 * 2 * (1/4)^2 = 1/4
    assert share((0.0, 1.0), (1.0, 1.0)) == 0.0
    assert all(map(math.isnan, (share((0.0, 1.0)), share((0.0,), (1.0,)), share((1.0, 1.0), (1.0, 1.0)))))
    assert "reward/stderr" not in rollout_metrics([group(0, played(1.0))])  # undefined: left out


def test_a_step_without_data_has_counts_and_no_averages() -> None:
    metrics = rollout_metrics([group(0, played(ended=Ended.CANCELLED))])
    assert metrics == {
        "groups/issued": 1,
        "groups/infrastructure_failures": 1,
        "reward/count": 0,
        "rollout/ended/cancelled": 1,
    }
    assert rollout_metrics([])["reward/count"] == 0


def test_one_group_gives_no_standard_error() -> None:
    assert math.isnan(clustered_reward_stderr([group(0, played(1.0), played(0.0, sample=1))]))


def test_with_groups_of_one_it_is_the_plain_standard_error() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    groups = [group(index, played(reward, group=index)) for index, reward in enumerate(rewards)]
    variance = sum((reward - 0.6) ** 2 for reward in rewards) / 4
    assert clustered_reward_stderr(groups) == pytest.approx(math.sqrt(variance / 5))


def test_copies_within_a_group_do_not_make_the_mean_more_certain() -> None:
    once = [group(index, played(float(index % 2), group=index)) for index in range(6)]
    eightfold = [group(item.index, *item.trajectories * 8) for item in once]
    assert clustered_reward_stderr(eightfold) == pytest.approx(clustered_reward_stderr(once))
