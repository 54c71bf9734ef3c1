"""Any plain gymnasium text environment, found by name and played as an episode."""

from __future__ import annotations

import threading
import zlib
from collections.abc import AsyncIterator
from typing import Any

import gymnasium
import pytest
import pytest_asyncio

from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment
from agentrl_envs.episode import (
    Environment,
    EnvironmentContractError,
    Episode,
    EpisodeUsageError,
    UnavailableError,
)
from agentrl_envs.grading import GraderSettings
from agentrl_envs.gym import UnicodeText
from agentrl_envs.reasoning import ReasoningEnvironment
from agentrl_envs.registry import ENVIRONMENTS, PluginError
from agentrl_envs.settings import GymnasiumSettings, ReasoningSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.types import Ended, Problem, Step, Verdict
from agentrl_sandbox.client import SandboxSettings

CLOSED: list[str] = []


class GuessEnv(gymnasium.Env[str, str]):
    """Guess the number in the problem's answer; says higher or lower, and breaks off after three guesses."""

    metadata = {"render_modes": [], "stop": ("\n",)}  # noqa: RUF012
    action_space = UnicodeText(100)
    observation_space = UnicodeText(100)

    def __init__(self, greeting: str = "Guess.") -> None:
        self.greeting = greeting

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert options is not None
        self.problem: Problem = options["problem"]
        self.guesses = 0
        return f"{self.greeting} {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert threading.current_thread().name.startswith("gymnasium-env")
        self.guesses += 1
        guess, gold = int(action), int(self.problem.answer)
        if guess == gold:
            return "yes", 1.0, True, False, {"verdict": "correct", "answer": action}
        if guess > 100:
            return "", 1e308, True, False, {}
        if guess < 0:
            return "", 0.0, True, False, {"ended": "void_turn"}
        return ("higher" if guess < gold else "lower"), 0.1, False, self.guesses == 3, {}

    def close(self) -> None:
        CLOSED.append(self.problem.id)


class NumberEnv(GuessEnv):
    """Not a text environment."""

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return 5, {}


class StuckEnv(GuessEnv):
    """Never answers until it is let go."""

    let_go = threading.Event()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.let_go.wait()
        return super().step(action)


class FickleEnv(GuessEnv):
    """The first instance continues after every guess, and the others end."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).instances += 1
        self.number = self.instances

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, self.number > 1, False, {}


class Nothing:
    """No environment at all."""


NUMBER = 5


@pytest_asyncio.fixture
async def environment() -> AsyncIterator[Environment]:
    settings = GymnasiumSettings(kwargs={"greeting": "Hi."}, threads=4)
    environment = resolve_environment(f"{__name__}:GuessEnv")(settings, SandboxSettings(), GraderSettings(), None)
    await environment.open()
    yield environment
    await environment.close()


async def test_a_gymnasium_class_is_an_environment(environment: Environment, problem: Problem) -> None:
    assert isinstance(environment, GymnasiumEnvironment)
    assert environment.describe() == ["gymnasium environment GuessEnv, blocking calls in up to 4 threads"]
    episode = environment.episode(problem)
    assert isinstance(episode, Episode)
    seed = zlib.crc32(b"toy-0")
    assert await episode.start() == f"Hi. {seed}"  # the same for every episode of the problem
    assert episode.stop_strings == ("\n",)
    assert episode.turn_complete("anything")
    assert await episode.step("3") == Step(observation="higher", reward=0.1, ended=None)
    with pytest.raises(
        EnvironmentContractError, match=r"toy-0: step\(\) returned the invalid reward 1e\+308; valid: a number"
    ):
        await episode.step("101")
    assert await episode.step("5") == Step(
        observation="yes", reward=1.0, ended=Ended.ANSWERED, verdict=Verdict.CORRECT, answer="5"
    )
    with pytest.raises(EpisodeUsageError, match="ended"):
        await episode.step("5")
    CLOSED.clear()
    await episode.close()
    await episode.close()
    assert CLOSED == ["toy-0"]
    with pytest.raises(EpisodeUsageError, match="not running"):
        await episode.step("5")


async def test_truncation_and_named_ends(environment: Environment, problem: Problem) -> None:
    episode = environment.episode(problem)
    await episode.start()
    assert [(await episode.step("9")).ended for _ in range(3)] == [None, None, Ended.TURN_LIMIT]
    other = environment.episode(problem)
    await other.start()
    assert (await other.step("-1")).ended is Ended.VOID_TURN
    await episode.close()
    await other.close()


async def test_fork_replays_the_actions(environment: Environment, problem: Problem) -> None:
    episode = environment.episode(problem)
    await episode.start()
    await episode.step("3")
    twin = await episode.fork()
    for each in (episode, twin):
        assert (await each.step("4")).ended is None
        assert (await each.step("4")).ended is Ended.TURN_LIMIT
        await each.close()


async def test_a_fork_that_ends_while_it_is_repeated_is_unavailable_and_closed(problem: Problem) -> None:
    environment = GymnasiumEnvironment(FickleEnv)
    await environment.open()
    episode = environment.episode(problem)
    await episode.start()
    await episode.step("1")
    await episode.step("2")
    CLOSED.clear()
    with pytest.raises(UnavailableError, match=r"replaying action 1 of 2 ended it \(answered\)"):
        await episode.fork()
    assert CLOSED == ["toy-0"]
    assert (await episode.step("3")).ended is None
    await episode.close()
    await environment.close()


async def test_errors_of_the_environment_are_not_swallowed(environment: Environment, problem: Problem) -> None:
    episode = environment.episode(problem)
    await episode.start()
    with pytest.raises(ValueError, match="invalid literal"):
        await episode.step("five")
    await episode.close()


async def test_an_observation_that_is_no_text_is_refused(problem: Problem) -> None:
    environment = GymnasiumEnvironment(NumberEnv)
    await environment.open()
    with pytest.raises(EnvironmentContractError, match="must return a str as its observation, not int"):
        await environment.episode(problem).start()
    await environment.close()


async def test_a_step_that_hangs_is_no_data(problem: Problem) -> None:
    environment = GymnasiumEnvironment(StuckEnv, GymnasiumSettings(call_deadline=0.5))
    await environment.open()
    episode = environment.episode(problem)
    await episode.start()
    assert await episode.step("5") == Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE)
    StuckEnv.let_go.set()
    await episode.close()
    await environment.close()


def test_our_own_environments_are_found_by_name() -> None:
    assert {"simpletir", "reasoning"} <= set(ENVIRONMENTS.names())
    parts = (SandboxSettings(), GraderSettings(), None)
    assert isinstance(resolve_environment("simpletir")(SimpleTIRSettings(), *parts), SimpleTIREnvironment)
    assert isinstance(resolve_environment("reasoning")(ReasoningSettings(), *parts), ReasoningEnvironment)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "simpeltir",
            "unknown environment 'simpeltir'; did you mean 'simpletir'? .valid: .*simpletir, module:attribute",
        ),
        ("agentrl_envs.nowhere:Env", "no module 'agentrl_envs.nowhere'"),
        (f"{__name__}:GessEnv", "has no 'GessEnv'; did you mean 'GuessEnv'"),
        (
            f"{__name__}:Nothing",
            r"neither a gymnasium.Env, nor a class with a reset method, nor a subclass of agentrl_envs",
        ),
        (f"{__name__}:NUMBER", "is a int, but must be a class or a function"),
    ],
)
def test_a_wrong_name_is_told_the_right_ones(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message.replace("?", r"\?")):
        resolve_environment(name)
