"""The queue loses no problem, whenever it is saved or what it waits for is cancelled."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest
from rollout.fakes import played

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.sampler import FiniteSource, ProblemSampler
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import PromptTooLongError, WorkQueue
from agentrl.trajectory import Group, Trajectory, assign_path_weights
from agentrl_envs.types import Ended, Verdict

PROBLEMS = ProblemSampler(ArithmeticSource(seed=1), seed=5).next(8)
LONG = {problem.id for problem in PROBLEMS[1::2]}


def queue() -> WorkQueue:
    return WorkQueue(
        ProblemSampler(ArithmeticSource(seed=1), seed=5), RolloutSettings(max_prompt_tokens=10, problems_per_step=1)
    )


async def measured(one: WorkQueue) -> Group:
    """The next request whose prompt fits; every second problem is too long."""
    request = await one.issue_next_group()
    while True:
        try:
            one.record_prompt_length(request, 100 if request.problem.id in LONG else 1)
        except PromptTooLongError as skipped:
            request = skipped.replacement
        else:
            return request


async def test_a_problem_is_not_lost_while_its_prompt_is_measured() -> None:
    first = queue()
    await measured(first)
    second = await first.issue_next_group()
    with pytest.raises(PromptTooLongError) as skipped:
        first.record_prompt_length(second, 100)
    third = skipped.value.replacement
    waiting = asyncio.ensure_future(first.issue_next_group())
    await asyncio.sleep(0)
    assert not waiting.done()  # the third problem's prompt is being measured
    saved = json.loads(json.dumps(first.state_dict()))
    wanted = [(place, problem.id) for place, problem in enumerate(PROBLEMS[::2])]

    resumed = queue()
    resumed.load_state_dict(saved)
    assert [(request.index, request.problem.id) for request in [await measured(resumed) for _ in range(4)]] == wanted

    first.record_prompt_length(third, None)  # its environment did not start: it counts as one that fits
    assert [(one.index, one.problem.id) for one in (third, await waiting)] == [wanted[1], (2, PROBLEMS[3].id)]
    assert first.take_skipped_count() == 1


async def test_a_problem_that_repeats_is_measured_in_each_of_its_groups() -> None:
    one = WorkQueue(
        ProblemSampler(FiniteSource("one", PROBLEMS[:1]), seed=5),
        RolloutSettings(max_prompt_tokens=10, problems_per_step=1),
    )
    first = await one.issue_next_group()
    one.record_prompt_length(first, 1)
    second = await one.issue_next_group()
    one.record_prompt_length(first, 1)  # another rollout of the first group
    assert [request["index"] for request in one.state_dict()["queue"]] == [0]
    one.record_prompt_length(second, 1)
    assert [request["index"] for request in one.state_dict()["queue"]] == [0, 1]


async def test_what_is_issued_again_was_measured() -> None:
    one = queue()
    first, second = (
        await measured(one),
        await one.issue_next_group(),
    )  # the second one is cancelled before it has a prompt
    one.requeue_untrained()
    again = await one.issue_next_group()
    one.record_prompt_length(again, 100)
    assert (again, await one.wait_for_newest_prompt_length()) == (first, first)
    assert (await one.issue_next_group()) == second


def tree(sample: int, *rewards: float, verdict: Verdict | None = None) -> tuple[Trajectory, ...]:
    """A rollout that forks after two tokens into a leaf of two tokens for each reward."""
    count = 1 + len(rewards)
    root = played(sample=sample, ended=Ended.FORKED, branches=count, path_weight=1.0)
    leaves = [
        played(reward, sample=sample, verdict=verdict, branch=n, branches=count, parent=0, fork=2, path_weight=1.0)
        for n, reward in enumerate(rewards, 1)
    ]
    return assign_path_weights([root, *leaves])


async def test_a_forked_rollout_is_evidence_of_one_rollout() -> None:
    sampler = ProblemSampler(ArithmeticSource(seed=1), seed=5)
    settings = RolloutSettings(problems_per_step=1, group_size=3, budget="neyman")
    one = WorkQueue(sampler, settings, updates_posteriors=True)
    request = await one.issue_next_group()
    one.record_prompt_length(request, 1)
    # One success of two leaves, a plain success, and a tree whose leaves were all excluded.
    trajectories = (*tree(0, 1.0, 0.0), played(1.0, sample=1), *tree(2, 1.0, 1.0, verdict=Verdict.GRADER_TIMEOUT))
    group = replace(request, trajectories=trajectories)
    assert one.budget_metrics([group])["posterior/success_error"] == pytest.approx(0.75 - 0.5)
    one.remove_trained_and_update_posteriors([group])
    posteriors = sampler.posteriors
    assert posteriors.beta_parameters(request.key) == (1 + 1.5, 1 + 0.5)
    # Both paths of the tree have four tokens, the plain rollout has two.
    assert posteriors.expected_energy(request.key) == pytest.approx((4 + 2) / 2 * (1 - math.exp(-0.5)))
