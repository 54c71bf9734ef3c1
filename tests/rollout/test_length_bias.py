"""Which groups are trained does not depend on how long they took: lengths in virtual time, as many as it takes."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean, stdev

import pytest
from rollout.simulation import Hardware, SimulatedEngine, SimulatedEnvironment, run_virtual, train_codec

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.driver import Driver
from agentrl.rollout.filters import FilterRules
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.worker import RolloutWorker
from agentrl.trajectory import Group

CODEC = train_codec()
BATCH = 4
SCHEDULES = ["synchronous", "overlapped", "asynchronous"]


def useful(group: Group) -> bool:
    return len({item.reward for item in group.trajectories}) > 1


def tokens(group: Group) -> int:
    return sum(item.model_tokens for item in group.trajectories)


async def train(schedule: str, *, steps: int, oversampling: float) -> tuple[list[Group], list[list[Group]]]:
    """Groups trained, and those played by step. A group's time is proportional to its length; rewards are coins."""
    hardware = Hardware(tokens_per_second=1e9, request_tokens_per_second=10.0, kv_tokens=10**9)
    engine = SimulatedEngine(hardware, lambda seed: random.Random(seed).randrange(10, 2000))
    settings = RolloutSettings(
        schedule=schedule,  # type: ignore[arg-type]
        max_staleness=2,
        problems_per_step=BATCH,
        group_size=2,
        oversampling=oversampling,
        max_extra_rounds=4,
    )
    environment = SimulatedEnvironment(turns=1, latency=lambda numbers: 0.0, seed=0)
    driver = Driver(environment=environment, engine=engine, codec=CODEC, settings=settings, seed=0)
    worker = RolloutWorker(
        driver=driver,
        sampler=ProblemSampler(ArithmeticSource(seed=1), seed=2),
        settings=settings,
        rules=FilterRules(void_turns="exclude", truncated="train", accuracy_range=None, drop_zero_variance=True),
    )
    worker.record_install(0)
    trained: list[Group] = []
    played: list[list[Group]] = []
    try:
        for step in range(steps):
            trained += await worker.next_batch(step)
            played.append(list(worker.sampled_groups))
            await asyncio.sleep(50.0)
            await worker.wait_until_weights_may_change()
            engine.pause()
            engine.resume(step + 1)
            worker.record_install(step + 1)
            worker.record_trained()
    finally:
        await worker.close()
    return trained, played


def test_a_synchronous_step_trains_the_first_that_were_issued_however_long_they_took() -> None:
    trained, played = run_virtual(train("synchronous", steps=30, oversampling=2.0))
    expected = [index for step in played for index in [group.index for group in step if useful(group)][:BATCH]]
    assert [group.index for group in trained] == expected
    assert [group.index for step in played for group in step] == list(range(sum(map(len, played))))
    assert sum(useful(group) for step in played for group in step) > len(trained) + 20  # many were one too many


@pytest.mark.parametrize("oversampling", [1.0, 2.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_trained_is_as_long_as_what_was_kept(schedule: str, oversampling: float) -> None:
    """What the filters keep beyond a batch is no shorter and no longer than what is trained: within 3 sigma."""
    trained, played = run_virtual(train(schedule, steps=200, oversampling=oversampling))
    chosen = {group.index for group in trained}
    kept = [group for step in played for group in step if useful(group)]
    left = [tokens(group) for group in kept if group.index not in chosen]
    assert len(left) > 50
    sigma = stdev(map(tokens, kept)) * (1 / len(left) + 1 / len(trained)) ** 0.5
    assert abs(fmean(left) - fmean(map(tokens, trained))) < 3 * sigma
