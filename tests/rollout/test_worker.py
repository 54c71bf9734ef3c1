"""The worker's queue: nothing issued is lost, nothing is trained twice."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from rollout.fakes import ScriptedEngine, ScriptedEnvironment, ScriptedEpisode, byte_codec, completion, ends

from agentrl.errors import SettingsError, WorldError
from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.driver import Driver
from agentrl.rollout.filters import FilterRules
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.worker import RolloutWorker
from agentrl_envs.episode import UnavailableError
from agentrl_envs.types import Ended, Problem, Step

CODEC = byte_codec()
TURN = completion(CODEC, "aEND")


def worker(
    *,
    step: Callable[[Problem, int], Step] = lambda _, made: ends(reward=float(made % 2)),
    prompt: Callable[[Problem], str] = lambda _: "P",
    answer: Callable[[], Any] = lambda: TURN,
    zero_variance: bool = False,
    greedy: bool = False,
    **changes: Any,
) -> RolloutWorker:
    settings = RolloutSettings(**{"problems_per_step": 3, "group_size": 2, **changes})
    environment = ScriptedEnvironment(lambda item, made: ScriptedEpisode([step(item, made)], prompt=prompt(item)))
    driver = Driver(
        environment=environment, engine=ScriptedEngine(lambda *_: answer()), codec=CODEC, settings=settings, seed=0
    )
    rules = FilterRules(void_turns="exclude", truncated="train", accuracy_range=None, drop_zero_variance=zero_variance)
    return RolloutWorker(
        driver=driver,
        sampler=ProblemSampler(ArithmeticSource(seed=1), seed=2),
        settings=settings,
        rules=rules,
        greedy=greedy,
    )


async def played(one: RolloutWorker, step: int) -> list[tuple[int, str]]:
    """Index and problem of each group that was played for the step."""
    await one.next_batch(step)
    return [(group.index, group.problem.id) for group in one.sampled_groups]


async def test_confirmed_problems_leave_and_new_ones_follow() -> None:
    one = worker()
    first = await played(one, 0)
    one.record_trained()
    second = await played(one, 1)
    assert [index for index, _ in first + second] == [0, 1, 2, 3, 4, 5]
    assert len({name for _, name in first + second}) == 6
    assert {item.step for group in one.sampled_groups for item in group.trajectories} == {1}


async def test_what_was_not_confirmed_is_played_again() -> None:
    one = worker()
    first = await played(one, 0)
    assert await played(one, 0) == first


async def test_a_resumed_worker_issues_first_what_was_not_trained_then_what_would_have_come() -> None:
    straight = worker()
    expected = []
    for step in range(3):
        expected.append(await played(straight, step))
        straight.record_trained()

    killed = worker()
    await killed.next_batch(0)
    killed.record_trained()
    await killed.next_batch(1)  # issued, and never confirmed
    state = json.loads(json.dumps(killed.state_dict()))
    assert [row["index"] for row in state["queue"]] == [3, 4, 5]

    resumed = worker()
    resumed.load_state_dict(state)
    again = await played(resumed, 1)
    resumed.record_trained()
    assert [again, await played(resumed, 2)] == expected[1:]


async def test_oversampling_plays_more_and_trains_what_is_asked() -> None:
    one = worker(oversampling=1.5)
    groups = await one.next_batch(0)
    assert (len(one.sampled_groups), [group.index for group in groups]) == (5, [0, 1, 2])
    assert (one.metrics["groups/trained"], one.metrics["groups/surplus"]) == (3, 2)
    one.record_trained()
    assert one.state_dict()["queue"] == []


async def test_dropped_groups_are_counted_and_leave_the_queue_too() -> None:
    one = worker(step=lambda *_: ends(reward=1.0), zero_variance=True)
    groups = await one.next_batch(0)
    assert (groups, one.metrics["groups/dropped_zero_variance"]) == ((), 3)
    assert (one.metrics["reward/mean"], one.metrics["groups/trained"]) == (1.0, 0)
    one.record_trained()
    assert one.state_dict()["queue"] == []


async def test_failures_are_counted_and_not_averaged() -> None:
    failing = worker(
        step=lambda _, made: ends(Ended.INFRASTRUCTURE_FAILURE) if made % 2 else ends(reward=1.0), retries=0
    )
    await failing.next_batch(0)
    metrics = failing.metrics
    assert metrics["reward/mean"] == 1.0
    assert metrics["groups/excluded"] == metrics["groups/infrastructure_failures"] == 6 - metrics["reward/count"] > 0


async def test_three_steps_in_a_row_without_data_end_the_run() -> None:
    lost = {0, 1, 3, 4, 5}  # step 2 has data: what counts are steps in a row
    now = [0]
    one = worker(
        step=lambda *_: ends(Ended.INFRASTRUCTURE_FAILURE) if now[0] in lost else ends(reward=0.0),
        zero_variance=True,
        retries=0,
    )
    for step in range(5):
        now[0] = step
        groups = await one.next_batch(step)
        assert groups == ()  # of step 2, too: its groups have equal rewards, which ends nothing
        one.record_trained()
    now[0] = 5
    message = r"steps 3 to 5: every rollout failed .* Fix its cause, then continue the run with --resume"
    with pytest.raises(WorldError, match=message):
        await one.next_batch(5)
    assert len(one.state_dict()["queue"]) == 3  # nothing that a resumed run needs is lost


async def test_long_prompts_are_skipped_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def prompt(item: Problem) -> str:
        if item.id not in seen:
            seen.append(item.id)
        return "long prompt" if seen.index(item.id) in (1, 2) else "P"

    one = worker(prompt=prompt, max_prompt_tokens=5)
    with caplog.at_level(logging.WARNING):
        groups = await played(one, 0)
    assert [index for index, _ in groups] == [0, 1, 2]
    assert [name for _, name in groups] == [seen[0], seen[3], seen[4]]
    assert one.metrics["groups/skipped_long_prompt"] == 2
    skipped = f"problem {seen[1]} is skipped: its prompt has 11 tokens, more than rollout.max_prompt_tokens=5"
    assert skipped in caplog.text


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped"])
@pytest.mark.parametrize("concurrency", [1, 2, 64])
async def test_a_problem_starts_once_for_each_rollout_and_a_skipped_one_once(schedule: str, concurrency: int) -> None:
    started: list[str] = []

    def prompt(item: Problem) -> str:
        started.append(item.id)
        return "long prompt" if len(set(started)) == 2 else "P"  # the second problem's

    one = worker(prompt=prompt, max_prompt_tokens=5, schedule=schedule, concurrency=concurrency, group_size=4)
    one.last_step = 0
    groups = await played(one, 0)
    await one.close()
    order = list(dict.fromkeys(started))
    assert groups == [(0, order[0]), (1, order[2]), (2, order[3])]
    assert sorted(started) == sorted([order[1], *(name for _, name in groups for _ in range(4))])


async def test_a_first_rollout_without_a_prompt_holds_nobody_up() -> None:
    failing = worker(
        step=lambda *_: ends(reward=1.0), prompt=lambda item: "P", retries=0, group_size=1, problems_per_step=3
    )
    environment: Any = failing.driver.environment
    build = environment._build

    def unavailable(item: Problem, made: int) -> ScriptedEpisode:
        episode = build(item, made)
        if made == 1:

            async def start() -> str:
                raise UnavailableError("the service is gone")

            episode.start = start
        return episode

    environment._build = unavailable
    await failing.next_batch(0)
    assert [group.trajectories[0].is_excluded for group in failing.sampled_groups] == [False, True, False]


async def test_prompts_that_are_all_too_long_mean_a_wrong_limit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(SettingsError, match=r"rollout\.max_prompt_tokens=5"):
        await worker(prompt=lambda _: "long prompt", max_prompt_tokens=5).next_batch(0)
    assert caplog.text.count("is skipped") == 10  # of a thousand
    assert caplog.text.count("later skips are only counted") == 1


async def test_past_the_step_deadline_it_says_what_is_missing_and_keeps_the_queue() -> None:
    slow = worker(answer=lambda: asyncio.sleep(60), step_deadline=0.05)
    with pytest.raises(WorldError, match=r"step 4: 0 of 3 groups .* rollout.step_deadline=0.05"):
        await slow.next_batch(4)
    assert len(slow.state_dict()["queue"]) == 3
    assert len(asyncio.all_tasks()) == 1


def useful_from(first: int) -> Callable[[Problem, int], Step]:
    """Both trajectories of a problem are right before the ``first``-th one to come up, then every second one."""
    seen: list[str] = []

    def step(problem: Problem, _: int) -> Step:
        seen.append(problem.id)
        distinct = list(dict.fromkeys(seen))
        useless = distinct.index(problem.id) < first
        return ends(reward=1.0 if useless else float(seen.count(problem.id) % 2))

    return step


async def test_dynamic_sampling_plays_on_until_the_batch_is_full() -> None:
    one = worker(step=useful_from(2), zero_variance=True, max_extra_rounds=5, concurrency=1)
    groups = await one.next_batch(0)
    # One of three is kept; two more would take six more, but a round is never larger than the first.
    assert [group.index for group in groups] == [2, 3, 4]
    assert [group.index for group in one.sampled_groups] == [0, 1, 2, 3, 4, 5]
    assert (one.metrics["groups/extra_rounds"], one.metrics["groups/surplus"]) == (1, 1)
    assert (one.metrics["groups/issued"], one.metrics["groups/dropped_zero_variance"]) == (6, 2)
    one.record_trained()
    assert one.state_dict()["queue"] == []


async def test_dynamic_sampling_gives_up_after_its_rounds() -> None:
    one = worker(step=useful_from(99), zero_variance=True, max_extra_rounds=2)
    groups = await one.next_batch(0)
    assert (len(one.sampled_groups), groups, one.metrics["groups/extra_rounds"]) == (9, (), 2)
    # Killed here, the same problems are played again, in as many rounds.
    resumed = worker(step=useful_from(99), zero_variance=True, max_extra_rounds=2)
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert await played(resumed, 0) == [(group.index, group.problem.id) for group in one.sampled_groups]


async def test_a_greedy_rollout_is_played_beside_the_group_and_is_none_of_it() -> None:
    one = worker(greedy=True, problems_per_step=1)
    await one.next_batch(0)
    (group,) = one.sampled_groups
    assert [item.sample for item in group.trajectories] == [0, 1]
    assert group.greedy is not None
    assert (group.greedy.sample, group.greedy.group) == (2, group.index)
    assert [item.sample for item in group.all_trajectories] == [0, 1, 2]
    assert (one.metrics["reward/count"], one.metrics["rollout/greedy"]) == (2, 1)
    assert one.metrics["reward/greedy_mean"] == group.greedy.reward
    temperatures = [request[2].temperature for request in one.driver.engine.requests]  # type: ignore[attr-defined]
    assert sorted(temperatures) == [0.0, 1.0, 1.0]
