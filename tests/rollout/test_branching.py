"""The measured placement of forks: estimates by hand, exploration, decay and checkpoints."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from rollout.fakes import problem

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.branching import ForkStatistics
from agentrl.rollout.settings import BranchingSettings, RolloutSettings
from agentrl.rollout.work_queue import WorkQueue
from agentrl.trajectory import Group, Segment, Trajectory, assign_path_weights
from agentrl_envs.types import Ended


def tree(*rewards: float, before: int = 1, after: int = 1, sample: int = 0) -> tuple[Trajectory, ...]:
    """A rollout of ``before`` tokens that forks after its first turn into branches of ``after`` tokens."""

    def edge(branch: int, tokens: int, reward: float, ended: Ended) -> Trajectory:
        segment = Segment(
            origin="model", token_ids=(1,) * tokens, log_probs=(-1.0,) * tokens, version_spans=((0, tokens),),
            reward=reward, text="a",
        )  # fmt: skip
        return Trajectory(
            problem=problem(0), step=0, group=0, sample=sample, prompt_ids=(9,), segments=(segment,), ended=ended,
            branch=branch, branches=1 + len(rewards), parent=-1 if branch == 0 else 0, fork=before if branch else 0,
            path_weight=1.0,
        )  # fmt: skip

    leaves = [edge(number, after, reward, Ended.STOPPED) for number, reward in enumerate(rewards, 1)]
    return assign_path_weights([edge(0, before, 0.0, Ended.FORKED), *leaves])


def learned(*group: tuple[Trajectory, ...], times: int = 8) -> ForkStatistics:
    statistics = ForkStatistics(decay=1.0)
    statistics.add_step([list(map(list, group))] * times)
    return statistics


def test_the_best_width_by_hand() -> None:
    # Within forks: variances 1/2 and 0, so v_after = 1/4. Between trees: means 1/2 and 0 with mean squares 1/2 and 0,
    # so the variance is 1/4 - 1/2 * 0 = 1/4, and v_before = 0: as many branches as possible.
    assert learned(tree(1, 0), tree(0, 0, sample=1)).best_widths(4) == (4,)
    # Within: 1/2 and 0, again 1/4. Between: 3/4 - 1/2 * 1, of which nothing is explained before the fork.
    assert learned(tree(1, 0), tree(1, 1, sample=1)).best_widths(3) == (3,)
    # Within: 0. Everything is decided before the fork.
    assert learned(tree(1, 1), tree(0, 0, sample=1)).best_widths(4) == (1,)
    # Trees (1, 1, 1, 0) and (0, 0, 0, 1): v_after = 1/4; between 1/2 - 3/4 * 1/4 = 5/16, so v_before = 1/16.
    for tokens, width in ((1, 2), (4, 4), (9, 6), (16, 8)):
        trees = tree(1, 1, 1, 0, before=tokens), tree(0, 0, 0, 1, before=tokens, sample=1)
        assert learned(*trees).best_widths(8) == (width,)


def test_the_estimates_have_the_right_mean() -> None:
    """p given the history is 0.2 or 0.8: v_before = 0.09 and v_after = 0.16, so the best width is 4/3 sqrt(c1 / c2)."""
    random_numbers = random.Random(1)
    groups = []
    for _ in range(4_000):
        chances = [random_numbers.choice((0.2, 0.8)) for _ in range(2)]
        groups.append([
            list(tree(*(float(random_numbers.random() < chance) for _ in range(2)), before=9, sample=number))
            for number, chance in enumerate(chances)
        ])  # fmt: skip
    statistics = ForkStatistics(decay=1.0)
    statistics.add_step(groups)
    ((weight, after, *_, trees, total),) = statistics.state_dict()
    assert after / weight == pytest.approx(0.16, abs=0.008)
    assert total / trees == pytest.approx(0.25, abs=0.008)
    assert statistics.best_widths(8) == (4,)


def test_turns_with_few_forks_are_explored_and_old_forks_decay() -> None:
    statistics = ForkStatistics(decay=0.5)
    assert statistics.best_widths(4) == ()
    group = [list(tree(1, 1)), list(tree(0, 0, sample=1))]
    statistics.add_step([group] * 4)
    assert statistics.best_widths(4) == (1,)
    statistics.add_step([])
    assert statistics.best_widths(4) == (2,)
    copy = ForkStatistics(decay=0.5)
    copy.load_state_dict(json.loads(json.dumps(statistics.state_dict())))
    assert copy.state_dict() == statistics.state_dict()


async def test_requests_keep_the_widths_of_their_time_in_a_checkpoint() -> None:
    branching = BranchingSettings(width=4, where="measured")
    settings = RolloutSettings(problems_per_step=1, group_size=2, branching=branching)

    def queue() -> WorkQueue:
        return WorkQueue(ProblemSampler(ArithmeticSource(seed=1), seed=5), settings)

    async def issue(one: WorkQueue) -> Group:
        request = await one.issue_next_group()
        one.record_prompt_length(request, 1)
        return request

    first = queue()
    before = await issue(first)
    assert before.widths == ()
    decided = (*tree(1, 1), *tree(0, 0, sample=1))
    trained = [replace(item, sample=2 * copy + item.sample) for copy in range(5) for item in decided]
    first.remove_trained_and_update_posteriors(
        [Group(problem=before.problem, index=before.index, trajectories=tuple(trained))]
    )
    after = await issue(first)
    assert after.widths == (1,)
    resumed = queue()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [await resumed.issue_next_group(), (await issue(resumed)).widths] == [after, (1,)]
    assert branching.width_after(1, leaves=8, measured=after.widths) == 1
    assert branching.width_after(2, leaves=8, measured=after.widths) == 2  # not measured yet
