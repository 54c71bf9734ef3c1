"""Environments that are classes with ``reset``: columns, tools, steps, rewards, forks, and TRL's form."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envs_chat import CHAT

from agentrl_envs import threads
from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory, ClassEpisode
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.episode import EnvironmentContractError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.registry import ENVIRONMENTS, PluginError
from agentrl_envs.settings import EnvironmentOptions
from agentrl_envs.tools import ToolError
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import SandboxSettings

HERE = __name__
PROBLEM = Problem(id="toy", statement="How many?", answer="3", source="toy", info={"rows": [1, 2, 3], "unit": "kg"})


class Shop:
    """A database, a graded answer, and an end of its own."""

    def __init__(self, grade: Any = None) -> None:
        self._grade = grade

    def reset(self, rows: list[int], answer: str, unit: str = "g") -> str:
        rows.append(99)  # a copy
        self._gold, self.done, self.right = answer, False, False
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create table shop (number integer)")
        self._database.executemany("insert into shop values (?)", [(row,) for row in rows[:-1]])
        return f"In {unit}."

    def query(self, sql: str) -> list[Any]:
        """Runs a query.

        Args:
            sql: the query
        """
        return self._database.execute(sql).fetchall()

    def answer(self, number: str) -> str:
        """Answers.

        Args:
            number: the answer
        """
        self.done, self.right = True, self._grade(number, self._gold)
        return "noted"

    def bug(self) -> str:
        """Fails."""
        raise AttributeError("oops")

    def get_reward(self) -> float:
        return 1.0 if self.right else 0.0


class Guess:
    """An environment that reads free text, asynchronously."""

    async def reset(self, **columns: Any) -> None:
        self.told: list[str] = []
        self.columns = columns

    async def step(self, text: str) -> tuple[str, float, bool]:
        self.told.append(text)
        return f"{len(self.told)} so far", 0.25, text == "stop"


class Graded(Guess):
    """It grades in an asynchronous method."""

    def __init__(self, grade: Any) -> None:
        self._grade = grade

    async def step(self, text: str) -> tuple[str, float, bool]:
        return "", float(await self._grade.of(text, "0.5")), True


class Lavish(Guess):
    async def step(self, text: str) -> tuple[str, float, bool]:
        return "", 1e308, True


class Counting:
    """TRL's form: no step, no get_reward asked for, errors are shown."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **kwargs: Any) -> str:
        return f"{kwargs['unit']} {kwargs['prompt'][-1]['content']}"

    def step(self, by: int) -> str:
        """Counts.

        Args:
            by: how far
        """
        if by > 9:
            raise AttributeError("too far")
        self.count += by
        return str(self.count)


class NoReset:
    pass


class Wants(Shop):
    def reset(self, database: str) -> str:  # type: ignore[override]
        return database


class WantsMore(Guess):
    async def reset(self, database: str, table: str, **columns: Any) -> None: ...  # type: ignore[override]


class Breaks(Guess):
    async def reset(self, **columns: Any) -> None:
        raise KeyError("gone")


class Odd(Guess):
    async def step(self, text: str) -> Any:
        return 3


class Needs(Shop):
    """It cannot be made without an argument."""

    def __init__(self, size: int) -> None:
        super().__init__()


class Stuck(Shop):
    """A tool that never returns, until the test lets it go."""

    let_go = threading.Event()
    closed = threading.Event()

    def wait(self) -> str:
        """Waits."""
        self.let_go.wait()
        return "late"

    def close(self) -> None:
        self.closed.set()


@asynccontextmanager
async def playing(name: str, *, plain: bool = False, **options: Any) -> AsyncIterator[tuple[ClassEpisode, str]]:
    ENVIRONMENTS.check(name)
    factory = resolve_environment(name)
    assert isinstance(factory, ClassEnvironmentFactory)
    settings = factory.validate_section(EnvironmentOptions(**options))
    environment = factory(settings, SandboxSettings(), GraderSettings(workers=1), None if plain else CHAT)
    await environment.open()
    episode = environment.episode(PROBLEM)
    try:
        yield episode, await episode.start()
    finally:
        await episode.close()
        await environment.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_reset_gets_the_columns_and_public_methods_are_tools() -> None:
    async with playing(f"{HERE}:Shop") as (episode, prompt):
        assert "How many?\n\nIn kg." in prompt
        step = await episode.step(call("query", sql="select count(*) from shop"))
        assert (step.observation, step.ended, step.reward) == ("</a>\n<t>[[3]]</t><a>", None, 0.0)
        last = await episode.step(call("answer", number="3.0"))
        assert (last.ended, last.reward, [one.outcome for one in last.tool_calls]) == (Ended.ANSWERED, 1.0, ["ok"])


async def test_a_turn_without_a_call_ends_the_episode_where_there_is_no_step() -> None:
    async with playing(f"{HERE}:Shop") as (episode, _):
        last = await episode.step("I give up.")
        assert (last.ended, last.reward) == (Ended.ANSWERED, 0.0)


async def test_the_last_turn_is_rewarded_too() -> None:
    async with playing(f"{HERE}:Shop", max_turns=1) as (episode, _):
        assert (await episode.step(call("query", sql="select 1"))).ended is Ended.TURN_LIMIT


async def test_a_bug_of_a_tool_names_it() -> None:
    async with playing(f"{HERE}:Shop") as (episode, _):
        with pytest.raises(ToolError, match=r"the tool 'bug' raised AttributeError: oops"):
            await episode.step(call("bug"))


@pytest.mark.parametrize("then", [call("wait"), "I give up."])
async def test_a_tool_that_never_returns_ends_its_trajectory_by_name(
    then: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(Stuck, "let_go", threading.Event())
    monkeypatch.setattr(Stuck, "closed", threading.Event())
    async with playing(f"{HERE}:Stuck", execution_timeout=0.5) as (episode, _):
        step = await episode.step(call("wait"))
        assert ("TimeoutError" in step.observation, step.ended) == (True, None)
        last = await episode.step(then)
        assert last.ended is Ended.INFRASTRUCTURE_FAILURE
    (record,) = caplog.records
    assert "problem toy: the tool 'wait' still blocks its instance" in record.getMessage()
    assert not Stuck.closed.is_set()
    Stuck.let_go.set()
    assert Stuck.closed.wait(60.0)  # the instance is closed when the call has ended after all


async def test_a_tool_that_is_only_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stuck, "let_go", threading.Event())
    async with playing(f"{HERE}:Stuck", execution_timeout=0.5) as (episode, _):
        assert "TimeoutError" in (await episode.step(call("wait"))).observation
        Stuck.let_go.set()
        assert (await episode.step("I give up.")).ended is Ended.ANSWERED


async def test_a_missing_argument_is_said_with_the_setting_that_gives_it() -> None:
    with pytest.raises(ToolError) as raised:
        async with playing(f"{HERE}:Needs"):
            pass
    assert str(raised.value) == (
        "creating Needs raised TypeError: Needs.__init__() missing 1 required positional argument: 'size'; "
        "set the arguments of __init__ in environment.kwargs"
    )
    async with playing(f"{HERE}:Needs", kwargs={"size": 3}):
        pass


async def test_free_text_goes_to_step() -> None:
    async with playing(f"{HERE}:Guess", plain=True) as (episode, prompt):
        assert prompt == "How many?\n"
        step = await episode.step("one")
        assert (step.observation, step.reward, step.ended) == (
            "\n<tool_response>\n1 so far\n</tool_response>\n",
            0.25,
            None,
        )
        twin = await episode.fork()
        assert (await episode.step("stop")).ended is Ended.ANSWERED
        assert "2 so far" in (await twin.step("two")).observation
        await twin.close()


async def test_an_asynchronous_method_awaits_the_grade() -> None:
    async with playing(f"{HERE}:Graded") as (episode, _):
        assert (await episode.step("1/2")).reward == 1.0


async def test_a_reward_beyond_the_bound_is_refused() -> None:
    async with playing(f"{HERE}:Lavish", plain=True) as (episode, _):
        with pytest.raises(
            EnvironmentContractError, match=r"Lavish' returned the invalid reward 1e\+308; valid: a number"
        ):
            await episode.step("one")


async def test_without_a_chat_template_calls_are_plain_text() -> None:
    async with playing(f"{HERE}:Shop", plain=True) as (episode, prompt):
        assert '"name": "query"' in prompt
        turn = f"Let me see.\n{call('query', sql='select 7')}"
        assert episode.stop_strings == ("</tool_call>",)
        assert (episode.turn_complete(turn), episode.turn_complete("Let me see.")) == (True, False)
        step = await episode.step(turn + call("answer", number="3"))  # what is sampled past the stop is no call
        assert step.observation == "\n<tool_response>\n[[7]]\n</tool_response>\n"


async def test_an_environment_for_trl_runs_unchanged() -> None:
    async with playing(f"trl:{HERE}:Counting") as (episode, prompt):
        assert "kg How many?" in prompt
        step = await episode.step(call("step", by=2) + call("step", by=3) + call("step", by=10))
        assert step.observation == "</a>\n<t>2|5|AttributeError: too far</t><a>"
        assert (await episode.step("Done.")).ended is Ended.ANSWERED


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Wants",
            r"reset\(\) of environment '.*:Wants' requires the column 'database'; columns of problem toy: answer",
        ),
        ("WantsMore", r"'.*:WantsMore' requires the columns 'database', 'table'; columns of problem toy: answer"),
        ("Breaks", r"reset\(\) of environment '.*:Breaks' raised KeyError: 'gone'"),
    ],
)
async def test_a_class_that_breaks_its_contract_is_named(name: str, message: str) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        async with playing(f"{HERE}:{name}"):
            pass


async def test_a_step_that_returns_something_else_is_named() -> None:
    async with playing(f"{HERE}:Odd") as (episode, _):
        with pytest.raises(EnvironmentContractError, match=r"step\(\) of .* must return text, None, or .*, not 3"):
            await episode.step("x")


def test_what_is_no_environment_is_said() -> None:
    with pytest.raises(PluginError, match="nor a class with a reset method"):
        resolve_environment(f"{HERE}:NoReset")
    factory = resolve_environment(f"{HERE}:Shop")
    assert isinstance(factory, ClassEnvironmentFactory)
    with pytest.raises(PluginError, match=r"environment.max_turn=3: Extra inputs .*\(valid settings: .*max_turns"):
        factory.validate_section(EnvironmentOptions(max_turn=3))
