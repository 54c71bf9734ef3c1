"""Fakes for environments: a sandbox that answers from a script, and episodes on top of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

import pytest
import pytest_asyncio

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREpisode
from agentrl_envs.types import Problem
from agentrl_sandbox.client import Execution, Isolation, Outcome

Answer = Execution | BaseException


def ran(stdout: str = "", *, stderr: str = "", outcome: Outcome = Outcome.OK, seconds: float = 0.25) -> Execution:
    return Execution(outcome=outcome, stdout=stdout, stderr=stderr, exit_code=0, seconds=seconds, truncated=False)


class ScriptedSandbox:
    """Answers the n-th execution with the n-th item of its script (an exception is raised); keeps what was asked."""

    def __init__(self, script: Iterable[Answer]) -> None:
        self._script = list(script)
        self.programs: list[str] = []
        self.request_ids: list[str | None] = []
        self.closed = False

    @property
    def isolation(self) -> Isolation:
        return Isolation(layers={"bounded_time": "script"}, mode="none")

    async def execute(
        self, program: str, *, timeout: float | None = None, stdin: str = "", request_id: str | None = None
    ) -> Execution:
        self.programs.append(program)
        self.request_ids.append(request_id)
        answer = self._script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def execution() -> Callable[..., Execution]:
    """Builds an `Execution`."""
    return ran


@pytest.fixture
def scripted_sandbox() -> Callable[..., ScriptedSandbox]:
    """Builds a sandbox from the executions it shall answer with."""
    return lambda *script: ScriptedSandbox(script)


@pytest_asyncio.fixture
async def grader() -> AsyncIterator[Grader]:
    grader = Grader(GraderSettings(workers=1))
    yield grader
    await grader.close()


@pytest.fixture
def problem() -> Problem:
    return Problem(id="toy-0", statement="What is 2 + 3?", answer="5", source="toy")


@pytest.fixture
def settings() -> SimpleTIRSettings:
    return SimpleTIRSettings(instruction="", max_turns=3, sandbox_attempts=2, sandbox_retry_wait=0.0)


@pytest.fixture
def play(
    problem: Problem, settings: SimpleTIRSettings, grader: Grader
) -> Callable[..., tuple[SimpleTIREpisode, ScriptedSandbox]]:
    """Builds an episode over a sandbox that answers with the given executions."""

    def build(
        *script: Answer, problem: Problem = problem, **changes: object
    ) -> tuple[SimpleTIREpisode, ScriptedSandbox]:
        sandbox = ScriptedSandbox(script)
        changed = settings.model_copy(update=changes)
        return SimpleTIREpisode(problem, settings=changed, sandbox=sandbox, grader=grader), sandbox

    return build
