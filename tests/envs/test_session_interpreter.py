"""``environment.interpreter=session``: programs share state over turns, forks take it along, a killed one loses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from agentrl_envs.episode import UnavailableError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import INSTRUCTIONS, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment, SimpleTIREpisode
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import SandboxSettings

pytestmark = pytest.mark.slow

PROBLEM = Problem(id="sum", statement="?", answer="5", source="toy", setup="def reveal():\n    return 40")


@pytest_asyncio.fixture
async def environment() -> AsyncIterator[SimpleTIREnvironment]:
    settings = SimpleTIRSettings(instruction="", interpreter="session", execution_timeout=6.0)
    made = SimpleTIREnvironment(
        settings, SandboxSettings(allow_unisolated=True, max_sessions=2), GraderSettings(workers=1)
    )
    await made.open()
    yield made
    await made.close()


async def run(episode: SimpleTIREpisode, program: str) -> str:
    step = await episode.step(f"```python\n{program}\n```")
    return step.observation.strip().removeprefix("Code execution result: ")


async def test_state_is_kept_over_turns_and_forked_with_the_episode(environment: SimpleTIREnvironment) -> None:
    episode = environment.episode(PROBLEM)
    await episode.start()
    assert await run(episode, "x = = 1") == "SyntaxError: invalid syntax"  # and the setup is there all the same
    assert await run(episode, "x = reveal() + 1; print(x)") == "41"
    twin = await episode.fork()
    assert await run(episode, "x += 1; print(x)") == "42"
    assert await run(twin, "print(x, reveal())") == "41 40"
    await twin.close()
    assert (await episode.step("```python\nfinal_answer(x - 37)\n```")).ended is Ended.ANSWERED
    await episode.close()
    again = environment.episode(PROBLEM)  # both sessions have ended: there is room for another
    await again.start()
    assert await run(again, "print('x' in globals())") == "False"
    await again.close()


async def test_a_killed_program_takes_the_state_along_and_says_so(environment: SimpleTIREnvironment) -> None:
    episode = environment.episode(PROBLEM)
    await episode.start()
    await run(episode, "x = 1")
    assert await run(episode, "while True: pass") == (
        "TimeoutError: the program did not finish in time; the interpreter was restarted and its variables are gone"
    )
    assert await run(episode, "print('x' in globals(), reveal())") == "False 40"
    await episode.close()


async def test_a_fork_of_a_killed_interpreter_starts_a_new_one(environment: SimpleTIREnvironment) -> None:
    episode = environment.episode(PROBLEM)
    await episode.start()
    await run(episode, "x = 1")
    await run(episode, "import os\nos.abort()")
    twin = await episode.fork()
    assert await run(twin, "print('x' in globals(), reveal())") == "False 40"
    await twin.close()
    await episode.close()


async def test_a_fork_waits_for_room_and_a_lost_session_fails_at_once(environment: SimpleTIREnvironment) -> None:
    episode, other = environment.episode(PROBLEM), environment.episode(PROBLEM)
    for one in (episode, other):  # as many sessions as the sandbox may have
        await one.start()
        await run(one, "x = 1")
    forking = asyncio.create_task(episode.fork())
    await asyncio.sleep(0)
    await other.close()
    twin = await forking
    assert await run(twin, "print(x)") == "1"
    await twin.close()
    assert episode._sandbox is not None
    assert episode._sandbox._session is not None
    await environment._require_sandbox().close_session(episode._sandbox._session)
    with pytest.raises(UnavailableError, match="session was lost"):
        await episode.fork()
    await episode.close()


async def test_a_program_that_leaves_the_interpreter_cannot_leave_the_data(environment: SimpleTIREnvironment) -> None:
    episode = environment.episode(PROBLEM)
    await episode.start()
    restarted = "; the interpreter was restarted and its variables are gone"
    assert (await run(episode, "x = 1\nimport os\nos.write(1, b'left')\nos._exit(0)")).endswith(f"left{restarted}")
    assert await run(episode, "print('x' in globals(), reveal())") == "False 40"
    # An uncaught MemoryError has the same outcome as a kill, but the interpreter lives.
    assert (await run(episode, "y = 1\nbytearray(10**12)")).endswith("needs more memory than it may use")
    assert await run(episode, "print(y)") == "1"
    await episode.close()


async def test_a_lost_session_is_an_infrastructure_failure(environment: SimpleTIREnvironment) -> None:
    episode = environment.episode(replace(PROBLEM, setup=""))
    await episode.start()
    await run(episode, "x = 1")
    assert episode._sandbox is not None
    assert episode._sandbox._session is not None
    await environment._require_sandbox().close_session(episode._sandbox._session)
    assert (await episode.step("```python\nprint(x)\n```")).ended is Ended.INFRASTRUCTURE_FAILURE
    await episode.close()


def test_the_model_is_told_that_programs_share_an_interpreter() -> None:
    for protocol in ("simpletir", "retool"):
        told = SimpleTIRSettings(protocol=protocol, interpreter="session").effective_instruction
        assert "fresh interpreter" not in told
        assert "which keeps variables and imports" in told
        assert SimpleTIRSettings(protocol=protocol).effective_instruction == INSTRUCTIONS[protocol]
