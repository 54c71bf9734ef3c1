"""Environments behind OpenEnv servers: the package's own where there is a Python with it, else one that keeps its wire.

``AGENTRL_OPENENV_PYTHON`` names a Python with openenv 0.10, whose dependencies differ from those of this package.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from envs.openenv_server import SCHEMAS, GuessServer, guess_server
from shared import python_with

from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.adapters.openenv import OpenEnvEnvironment, choose_text_fields
from agentrl_envs.episode import EnvironmentContractError, UnavailableError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import EnvironmentOptions, OpenEnvSettings
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import SandboxSettings

PROBLEM = Problem(id="seeds-train-0-3", statement="seeds-train-0-3", answer=None, source="seeds", info={"number": 6})


@pytest.fixture
async def server() -> AsyncIterator[GuessServer]:
    async with guess_server() as server:
        yield server


async def opened(url: str, **settings: Any) -> OpenEnvEnvironment:
    environment = resolve_environment(f"openenv:{url}")(
        OpenEnvSettings(**settings), SandboxSettings(), GraderSettings(), None
    )
    assert isinstance(environment, OpenEnvEnvironment)
    await environment.open()
    return environment


async def test_the_text_fields_are_found_and_an_episode_is_played_to_its_reward(server: GuessServer) -> None:
    environment = await opened(server.url, instruction="One number.")
    assert 'action {"guess": "{text}"}, observation hint' in environment.describe()[0]
    episode = environment.episode(PROBLEM)
    assert await episode.start() == "One number.\nGuess from 1 to 8.\n"
    step = await episode.step("4")
    assert (step.observation, step.reward, step.ended) == ("\nhigher\n", 0.0, None)
    step = await episode.step("6")
    assert (step.observation, step.reward, step.ended) == ("", 1.0, Ended.ANSWERED)
    await episode.close()
    assert (server.open, server.resets) == (0, [{"seed": server.resets[0]["seed"], "number": 6}])


async def test_a_problem_is_a_seed(server: GuessServer) -> None:
    environment = await opened(server.url)
    for name in ("seeds-0", "seeds-0", "seeds-1"):
        episode = environment.episode(Problem(id=name, statement=name, answer=None, source="seeds"))
        await episode.start()
        await episode.close()
    first, again, other = (reset["seed"] for reset in server.resets)
    assert first == again != other


async def test_a_refused_action_is_answered_and_turns_are_limited(server: GuessServer) -> None:
    environment = await opened(server.url, max_turns=2)
    episode = environment.episode(PROBLEM)
    await episode.start()
    step = await episode.step("four")
    assert (step.observation, step.ended) == ("\nError: Invalid message: not a number\n", None)
    assert [call.outcome for call in step.tool_calls] == ["malformed"]
    assert (await episode.step("5")).ended is Ended.TURN_LIMIT
    await episode.close()


async def test_a_fork_replays_what_was_done(server: GuessServer) -> None:
    environment = await opened(server.url, max_turns=2)
    episode = environment.episode(PROBLEM)
    await episode.start()
    await episode.step("4")
    twin = await episode.fork()
    assert (await twin.step("5")).ended is Ended.TURN_LIMIT
    assert (await episode.step("6")).ended is Ended.ANSWERED
    await episode.close()
    await twin.close()


async def test_a_fork_that_fails_while_it_is_repeated_is_unavailable_and_closed(server: GuessServer) -> None:
    environment = await opened(server.url)
    episode = environment.episode(PROBLEM)
    await episode.start()
    await episode.step("4")
    answer = server.answer

    def broken(message: dict[str, Any], number: int) -> dict[str, Any]:
        if message["type"] == "step":
            return {"type": "error", "data": {"message": "no episode", "code": "SESSION_ERROR"}}
        return answer(message, number)

    server.answer = broken  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match=r"replaying action 1 of 1 ended it \(infrastructure_failure\)"):
        await episode.fork()
    server.answer = answer  # type: ignore[method-assign]
    await server.closed.wait()
    assert server.open == 1
    assert (await episode.step("6")).ended is Ended.ANSWERED
    await episode.close()


async def test_forks_do_not_wait_for_sessions_that_only_forks_hold() -> None:
    async with guess_server(sessions=2) as server:
        environment = await opened(server.url)
        first, second = (environment.episode(PROBLEM) for _ in range(2))
        await first.start()
        await second.start()
        with pytest.raises(TimeoutError):  # learns the limit, and waits for the second episode
            await asyncio.wait_for(first.fork(), 0.5)
        waiting = asyncio.create_task(first.fork())
        await asyncio.sleep(0.1)
        with pytest.raises(UnavailableError, match="allows 2 concurrent sessions, and forked rollouts hold all"):
            await second.fork()
        assert not waiting.done()
        await second.close()
        twin = await waiting
        assert (await twin.step("6")).ended is Ended.ANSWERED
        await twin.close()
        await first.close()
        third = environment.episode(PROBLEM)  # sessions of forked episodes have been returned
        await third.start()
        fork = await third.fork()
        await fork.close()
        await third.close()


async def test_more_episodes_than_sessions_stand_in_line() -> None:
    async with guess_server(sessions=2) as server:
        environment = await opened(server.url)

        async def play() -> Ended | None:
            episode = environment.episode(PROBLEM)
            await episode.start()
            step = await episode.step("6")
            await episode.close()
            return step.ended

        ended = await asyncio.gather(*(play() for _ in range(12)))
        assert ended == [Ended.ANSWERED] * 12
        assert server.most == 2
        assert 1 <= server.refused <= 10  # the first to come learn it, the others wait


async def test_a_session_that_another_holds_is_waited_for() -> None:
    async with guess_server(sessions=1) as server:
        holder = await opened(server.url)
        holding = holder.episode(PROBLEM)
        await holding.start()
        waiter = await opened(server.url)
        episode = waiter.episode(PROBLEM)
        start = asyncio.create_task(episode.start())
        while not server.refused:  # it has asked
            await asyncio.sleep(0)
        await holding.close()
        assert await start == "Guess from 1 to 8.\n"
        await episode.close()


async def test_a_start_that_is_cancelled_leaves_no_session() -> None:
    async with guess_server(sessions=1) as server:
        environment = await opened(server.url)
        first, second = environment.episode(PROBLEM), environment.episode(PROBLEM)
        await first.start()
        start = asyncio.create_task(second.start())
        while not server.refused:
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await first.close()
        third = environment.episode(PROBLEM)
        await third.start()
        await third.close()
        assert server.open == 0


async def test_a_server_that_goes_away_is_no_data(server: GuessServer) -> None:
    environment = await opened(server.url)
    episode = environment.episode(PROBLEM)
    await episode.start()
    assert server.server is not None
    server.server.close()
    await server.server.wait_closed()
    assert (await episode.step("4")).ended is Ended.INFRASTRUCTURE_FAILURE
    await episode.close()
    with pytest.raises(UnavailableError, match=f"OpenEnv server {re.escape(server.url)} cannot be reached: "):
        await environment.episode(PROBLEM).start()
    with pytest.raises(UnavailableError, match="cannot be reached: "):
        await opened(server.url)


async def test_what_is_not_openenvs_is_said(server: GuessServer) -> None:
    episode = (await opened(server.url)).episode(PROBLEM)
    await episode.start()
    with pytest.raises(EnvironmentContractError, match="sent a message of type 'state' instead of an observation"):
        await episode.step("0")
    await episode.close()
    with pytest.raises(PluginError, match=r"is not an OpenEnv server: .* returned status 404"):
        await opened(server.url + "/elsewhere")
    with pytest.raises(PluginError, match="write openenv:http://HOST:PORT"):
        await opened("ftp://somewhere")
    wrong = (await opened(server.url, observation="hints")).episode(PROBLEM)
    with pytest.raises(EnvironmentContractError, match=r"no field 'hints' \(fields: metadata, hint, guesses\)"):
        await wrong.start()
    await wrong.close()


TWO = {"properties": {"code": {"type": "string"}, "language": {"type": "string"}, "type": {"const": "x"}}}
TOOL = {"tool_name": "run", "arguments": {"code": "{text}"}}


@pytest.mark.parametrize(
    ("schemas", "settings", "said"),
    [
        (SCHEMAS | {"action": TWO}, {}, "its action has the text fields code, language; select one with environment"),
        (
            SCHEMAS | {"action": {}},
            {},
            r"its action has no text field \(fields: \); select one with environment.action",
        ),
        (SCHEMAS | {"observation": TWO}, {}, "its observation has the text fields code, language"),
        (SCHEMAS | {"reset_observation": TWO}, {}, "its first observation has the text fields"),
        (SCHEMAS, {"action": {"guess": "4"}}, r"must contain \{text\}"),
    ],
)
def test_a_field_that_must_be_named(schemas: dict[str, Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        choose_text_fields(schemas, OpenEnvSettings(**settings), "http://there")


def test_fields_that_are_named() -> None:
    settings = OpenEnvSettings(action=TOOL, observation="result.text")
    fields = choose_text_fields({"action": TWO, "observation": TWO}, settings, "http://there")
    assert fields.action_for_text('print("{}")') == {"tool_name": "run", "arguments": {"code": 'print("{}")'}}
    assert (fields.first_observation, fields.later_observation) == ("result.text", "result.text")


def test_a_setting_that_is_none_is_named() -> None:
    factory: Any = resolve_environment("openenv:localhost:8000")
    with pytest.raises(PluginError, match=r"environment\.max_turn=4: .*valid settings: action, observation"):
        factory.validate_section(EnvironmentOptions(max_turn=4))


REAL = """
import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    word: str


class Heard(Observation):
    said: str = ""


class SayTheWord(Environment):
    def reset(self, seed=None, number=0, **_):
        self.number = number
        return Heard(said=f"Say the word of number {number}.")

    def step(self, action, **_):
        if action.word == "crash":
            raise RuntimeError("a crash of the environment")
        right = action.word == f"word-{self.number}"
        return Heard(said="yes" if right else f"not {action.word}", reward=float(right), done=right)

    @property
    def state(self):
        return State()


listener = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
app = create_fastapi_app(SayTheWord, Say, Heard)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
"""


@pytest.fixture
def real_server() -> Iterator[str]:
    process = subprocess.Popen(
        [python_with("openenv"), "-c", REAL], stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_server_of_the_package_itself(real_server: str) -> None:
    """It allows one session: the second and third episode wait for it."""
    environment = await opened(real_server)

    async def play(word: str) -> tuple[str, str, float, Ended | None]:
        episode = environment.episode(PROBLEM)
        prompt = await episode.start()
        first = await episode.step("no")
        assert (first.observation, first.reward, first.ended) == ("\nnot no\n", 0.0, None)
        refused = await episode.step("crash")
        assert refused.observation == "\nError: a crash of the environment\n"
        last = await episode.step(word)
        await episode.close()
        return prompt, last.observation, last.reward, last.ended

    played = await asyncio.gather(*(play("word-6") for _ in range(3)))
    assert played == [("Say the word of number 6.\n", "\nyes\n", 1.0, Ended.ANSWERED)] * 3
