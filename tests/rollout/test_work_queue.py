"""The queue loses no problem, whenever it is saved or what it waits for is cancelled."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl.problems.demonstrations.arithmetic import ArithmeticSource
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.work_queue import WorkQueue
from agentrl_envs.types import Problem


class Gate:
    """Measures prompts; waits from the third problem on until it is opened. Every second problem is too long."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.waits = asyncio.Event()
        self.opened = asyncio.Event()

    async def measure(self, problem: Problem) -> int:
        self.seen.append(problem.id)
        if len(self.seen) > 2:
            self.waits.set()
            await self.opened.wait()
        return 100 if problem.id in LONG else 1


PROBLEMS = ProblemSampler(ArithmeticSource(seed=1), seed=5).next(8)
LONG = {problem.id for problem in PROBLEMS[1::2]}


def queue(gate: Gate) -> WorkQueue:
    sampler = ProblemSampler(ArithmeticSource(seed=1), seed=5)
    return WorkQueue(sampler, prompt_tokens=gate.measure, max_prompt_tokens=10)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_problem_is_not_lost_while_its_prompt_is_measured(cancelled: bool) -> None:
    gate = Gate()
    first = queue(gate)
    await first.next()
    issuing = asyncio.create_task(first.next())  # skips the second problem and waits for the third's prompt
    await gate.waits.wait()
    if cancelled:
        issuing.cancel()
        await asyncio.gather(issuing, return_exceptions=True)
    saved = json.loads(json.dumps(first.state_dict()))
    gate.opened.set()

    resumed = queue(gate)
    resumed.load_state_dict(saved)
    wanted = [(place, problem.id) for place, problem in enumerate(PROBLEMS[::2])]
    assert [(request.index, request.problem.id) for request in [await resumed.next() for _ in range(4)]] == wanted
    if not cancelled:
        assert (await issuing).problem.id == PROBLEMS[2].id
    else:  # nor in the queue that goes on
        assert (await first.next()).problem.id == PROBLEMS[2].id
