"""Rollouts ahead of training, on the real worker and driver with scripted engines."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rollout.fakes import ScriptedEngine, ScriptedEnvironment, ScriptedEpisode, byte_codec, completion, ends

from agentrl.errors import WorldError
from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.driver import Driver
from agentrl.rollout.filters import FilterRules
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.worker import RolloutWorker
from agentrl.trajectory import Group

CODEC = byte_codec()


def group_of(trajectory_id: str) -> int:
    return int(trajectory_id.split("-")[1])


class Policy:
    """An engine whose version can change, and whose answers for a group may be long in coming."""

    def __init__(self, wait: Callable[[int], Any] | None = None, text: Callable[[int], str] | None = None) -> None:
        self.version = 0
        self._wait = wait
        self._text = text or (lambda _: "a")
        self.engine = ScriptedEngine(self._answer)

    async def _answer(self, trajectory_id: str, _: int) -> Any:
        group = group_of(trajectory_id)
        version = self.version
        if self._wait is not None:
            await self._wait(group)
        return completion(CODEC, self._text(group) + "END", version=version)


@asynccontextmanager
async def working(policy: Policy, *, last_step: int | None = None, state: Any = None, **changes: Any) -> Any:
    settings = RolloutSettings(**{"problems_per_step": 2, "group_size": 2, "schedule": "asynchronous", **changes})
    environment = ScriptedEnvironment(lambda item, made: ScriptedEpisode([ends(reward=float(made % 2))]))
    driver = Driver(environment=environment, engine=policy.engine, codec=CODEC, settings=settings, seed=0)
    worker = RolloutWorker(
        driver=driver,
        sampler=ProblemSampler(ArithmeticSource(seed=1), seed=2),
        settings=settings,
        rules=FilterRules(void_turns="train", truncated="train", accuracy_range=None, drop_zero_variance=False),
        last_step=last_step,
    )
    if state is not None:
        worker.load_state_dict(state)
    try:
        yield worker
    finally:
        await worker.close()
        assert len(asyncio.all_tasks()) == 1, "tasks are left"


def indices(groups: Sequence[Group]) -> list[int]:
    return [group.index for group in groups]


async def train(worker: RolloutWorker, policy: Policy) -> None:
    """What the session does after an update."""
    await worker.wait_until_weights_may_change()
    policy.version += 1
    worker.record_install(policy.version)
    worker.record_trained()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_rollouts_go_on_while_a_batch_trains_and_stop_at_the_bound() -> None:
    policy = Policy()
    async with working(policy, max_staleness=1) as worker:
        first = await worker.next_batch(1)
        await until(lambda: len(policy.engine.counts) == 8)  # two batches of two groups of two
        await asyncio.sleep(0.01)
        assert len(policy.engine.counts) == 8
        assert indices(first) == [0, 1]
        await train(worker, policy)
        await until(lambda: len(policy.engine.counts) == 12)
        second = await worker.next_batch(2)
        assert (indices(second), worker.version) == ([2, 3], 1)
        assert (worker.metrics["staleness/mean"], worker.metrics["staleness/max"]) == (1.0, 1)


async def test_a_slow_group_is_overtaken_until_it_is_due_and_never_dropped() -> None:
    slow = asyncio.Event()
    policy = Policy(wait=lambda group: slow.wait() if group == 0 else asyncio.sleep(0))
    async with working(policy, max_staleness=2) as worker:
        trained = []
        for step in (1, 2):
            groups = await worker.next_batch(step)
            trained += indices(groups)
            await train(worker, policy)
        assert trained == [1, 2, 3, 4]
        waiting = asyncio.create_task(worker.next_batch(3))
        await asyncio.sleep(0.02)
        assert not waiting.done()  # 0 is due
        slow.set()
        groups = await waiting
        assert indices(groups) == [0, 5]
        assert worker.metrics["staleness/max"] == 2


@pytest.mark.parametrize("staleness", [1, 4])
async def test_the_lengths_trained_are_those_generated(staleness: int) -> None:
    """Long answers take long, so they finish last; yet each is trained, once."""
    steps, lengths = 30, {}
    chance = random.Random(0)

    def text(group: int) -> str:
        if group not in lengths:
            lengths[group] = int(chance.paretovariate(1.2)) % 200 + 1
        return "a" * lengths[group]

    policy = Policy(wait=lambda group: asyncio.sleep(len(text(group)) * 1e-3), text=text)
    trained: Counter[int] = Counter()
    reordered = 0
    async with working(policy, max_staleness=staleness, problems_per_step=3, last_step=steps) as worker:
        for step in range(1, steps + 1):
            groups = await worker.next_batch(step)
            trained.update(item.model_tokens - 3 for group in groups for item in group.trajectories)
            reordered += indices(groups) != list(range(3 * step - 3, 3 * step))
            assert worker.metrics["staleness/max"] <= staleness
            await train(worker, policy)
    assert len(lengths) == 3 * steps
    assert trained == Counter({length: 2 * count for length, count in Counter(lengths.values()).items()})
    assert reordered > 0


async def test_overlapped_batches_are_of_one_version_and_one_step_old() -> None:
    slow = asyncio.Event()
    policy = Policy(wait=lambda group: slow.wait() if group == 3 else asyncio.sleep(0))
    async with working(policy, schedule="overlapped", last_step=3) as worker:
        await worker.next_batch(1)
        settling = asyncio.create_task(train(worker, policy))
        await asyncio.sleep(0.02)
        assert not settling.done()  # group 3 is still being played by version 0
        slow.set()
        await settling
        for step in (2, 3):
            groups = await worker.next_batch(step)
            spans = {
                span[0] for group in groups for row in group.trajectories for span in row.segments[0].version_spans
            }
            assert (indices(groups), spans, worker.version) == ([2 * step - 2, 2 * step - 1], {step - 2}, step - 1)
            await train(worker, policy)
        assert worker.state_dict()["queue"] == []


async def test_what_was_under_way_is_reissued_first() -> None:
    policy = Policy()
    async with working(policy, max_staleness=2) as worker:
        await worker.next_batch(1)
        await train(worker, policy)
        await until(lambda: len(policy.engine.counts) == 16)
        state = json.loads(json.dumps(worker.state_dict()))
    assert [row["index"] for row in state["queue"]] == [2, 3, 4, 5, 6, 7]
    again = Policy()
    async with working(again, max_staleness=1, state=state) as worker:
        for step, expected in ((2, [2, 3]), (3, [4, 5]), (4, [6, 7]), (5, [8, 9])):
            groups = await worker.next_batch(step)
            assert indices(groups) == expected
            issued = {row["index"]: row["problem"]["id"] for row in state["queue"]}
            assert all(issued.get(group.index, group.problem.id) == group.problem.id for group in groups)
            await train(worker, again)


async def test_dynamic_sampling_takes_more_of_what_is_there() -> None:
    policy = Policy()
    async with working(policy, max_staleness=1, max_extra_rounds=3, problems_per_step=2) as worker:
        # Two batches of four, as if the filters had refused the first two groups.
        play = worker._start_source(1)
        deadline = asyncio.get_running_loop().time() + 60
        first = await play.take_groups(2, step=1, deadline=deadline)
        more = await play.take_groups(2, step=1, deadline=deadline, refill=True)
        assert [group.index for group in first + more] == [0, 1, 2, 3]
        play.record_trained()
        second = await play.take_groups(2, step=2, deadline=deadline)
        assert [group.index for group in second] == [4, 5]
        await play.close()


async def test_what_fails_in_the_background_raises_where_groups_are_taken() -> None:
    policy = Policy(wait=lambda group: _raise() if group == 2 else asyncio.sleep(0))
    async with working(policy, max_staleness=1) as worker:
        await worker.next_batch(1)
        await train(worker, policy)
        with pytest.raises(ZeroDivisionError):
            await worker.next_batch(2)


async def test_past_the_deadline_it_says_what_is_missing() -> None:
    policy = Policy(wait=lambda group: asyncio.sleep(3600) if group == 1 else asyncio.sleep(0))
    async with working(policy, max_staleness=0, step_deadline=3.0) as worker:
        with pytest.raises(WorldError, match=r"step 7: 1 of 2 groups .* rollout.step_deadline=3 s"):
            await worker.next_batch(7)
    async with working(policy, schedule="overlapped", step_deadline=3.0, last_step=2) as worker:
        slow = Policy(wait=lambda group: asyncio.sleep(3600) if group > 1 else asyncio.sleep(0))
        worker.driver.engine = slow.engine
        await worker.next_batch(1)
        with pytest.raises(WorldError, match=r"step 1: 0 of 2 groups"):
            await train(worker, slow)


async def test_a_token_older_than_promised_is_a_bug() -> None:
    policy = Policy()
    async with working(policy, max_staleness=1) as worker:
        for step in (1, 2):
            await worker.next_batch(step)
            worker.record_install(step)  # while the engine goes on with version 0
            worker.record_trained()
        with pytest.raises(RuntimeError, match=r"step 3: a token is 2 steps old, .*asynchronous allows at most 1"):
            await worker.next_batch(3)


async def _raise() -> None:
    raise ZeroDivisionError
