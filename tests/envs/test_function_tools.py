"""Tools from plain functions and classes: schemas, threads, state, forks, concurrency, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import pytest
from envs_chat import CHAT
from transformers.utils import get_json_schema

from agentrl_envs.episode import UnavailableError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment, SimpleTIREpisode
from agentrl_envs.tools import ToolError, calling, load_tools
from agentrl_envs.tools.schema import function_schema
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution, Outcome

HERE = __name__
PROBLEM = Problem(id="toy", statement="?", answer="5", source="toy", info={"rows": [1, 2, 3]})
MEETING = threading.Barrier(2, timeout=60)


def add(a: int, b: int = 1) -> str:
    """Adds.

    Args:
        a: the first number
        b: the second number
    """
    return str(a + b)


async def later(unit: Literal["s", "ms"], problem: Problem) -> dict[str, Any]:
    """Answers with JSON.

    Args:
        unit: a unit of time
    """
    await asyncio.sleep(0)
    return {"unit": unit, "rows": problem.info["rows"]}


def pieces(count: int) -> Iterator[str]:
    """Gives its text in pieces.

    Args:
        count: how many
    """
    yield from (f"{number};" for number in range(count))


async def late_pieces() -> AsyncIterator[str]:
    """Gives its text in pieces, later."""
    for number in range(2):
        await asyncio.sleep(0)
        yield f"{number};"


def meet() -> str:
    """Returns once two calls are here."""
    MEETING.wait()
    return "met"


def fails(how: str) -> str:
    """Fails.

    Args:
        how: the kind of failure
    """
    raise {
        "value": ValueError("no such row"),
        "bug": NameError("name 'x' is not defined"),
        "gone": httpx.ConnectError("refused"),
        "gone too": ConnectionRefusedError("refused"),
        "said": UnavailableError("the shop is closed"),
    }[how]


async def rude() -> str:
    """Computes on the event loop."""
    return "done"


async def runs(code: str, sandbox: Any) -> str:
    """Runs code.

    Args:
        code: the code
    """
    return (await sandbox.execute(code, files={"in.txt": b"1"}, fetch_files=["out.txt"])).stdout  # type: ignore[no-any-return]


def blocks(code: str, sandbox: Any) -> str:
    """Runs code from a thread.

    Args:
        code: the code
    """
    return sandbox.run(code).stdout  # type: ignore[no-any-return]


def no_types(a) -> str:  # type: ignore[no-untyped-def]
    """Adds.

    Args:
        a: a number
    """
    return str(a)


def no_docstring(a: int) -> str:
    return str(a)


def no_description(a: int) -> str:
    """Adds."""
    return str(a)


def many(*numbers: int) -> str:
    """Adds.

    Args:
        numbers: numbers
    """
    return str(numbers)


def unknown_type(a: "Nowhere") -> str:  # type: ignore[name-defined] # noqa: F821, UP037
    """Adds.

    Args:
        a: a number
    """
    return str(a)


class Shop:
    """A database of each episode's own, in SQLite, whose connections belong to one thread."""

    open_shops = 0

    def __init__(self, problem: Problem) -> None:
        type(self).open_shops += 1
        self._rows = list(problem.info["rows"])
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create table shop (number integer)")
        self._database.executemany("insert into shop values (?)", [(row,) for row in self._rows])

    def query(self, sql: str) -> list[Any]:
        """Runs a query.

        Args:
            sql: the query
        """
        return self._database.execute(sql).fetchall()

    def insert(self, number: int) -> str:
        """Inserts a row.

        Args:
            number: its only column
        """
        self._rows.append(number)
        self._database.execute("insert into shop values (?)", (number,))
        return "inserted"

    def fork(self) -> Shop:
        return Shop(Problem(id="fork", statement="?", answer=None, source="toy", info={"rows": self._rows}))

    def close(self) -> None:
        type(self).open_shops -= 1
        self._database.close()


class Busy:
    """A tool that cannot be copied at the moment."""

    def wait(self) -> str:
        """Waits."""
        return "waited"

    def fork(self) -> Busy:
        raise UnavailableError("no room")


class Counter:
    """State that a deep copy copies."""

    def __init__(self) -> None:
        self.count = 0

    def count_up(self) -> int:
        """Counts."""
        self.count += 1
        return self.count


class ForksLater(Counter):
    """A fork that is awaited."""

    async def fork(self) -> ForksLater:
        await asyncio.sleep(0)
        twin = ForksLater()
        twin.count = self.count
        return twin


class ForksNothing(Counter):
    def fork(self) -> None:
        """Forgets to return the copy."""


class AsksTooMuch:
    def __init__(self, database: str) -> None: ...


class Broken(Counter):
    def __init__(self) -> None:
        raise OSError("no disk")


class NoTools:
    pass


@asynccontextmanager
async def episode(*tools: str, sandbox: Any = None, **changes: Any) -> AsyncIterator[SimpleTIREpisode]:
    settings = SimpleTIRSettings(protocol="hermes", tools=tuple(f"{HERE}:{tool}" for tool in tools), **changes)
    environment = SimpleTIREnvironment(settings, None, GraderSettings(workers=1), chat=CHAT, sandbox=sandbox)
    await environment.open()
    made = environment.episode(PROBLEM)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        await environment.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def said(made: SimpleTIREpisode, *calls: str) -> list[str]:
    step = await made.step("".join(calls))
    return step.observation.removeprefix("</a>\n<t>").removesuffix("</t><a>").split("|")


def test_the_schema_comes_from_the_signature_and_the_docstring() -> None:
    (one, two) = load_tools((f"{HERE}:add", f"{HERE}:later")).schemas
    assert one.as_openai_function()["function"] == {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first number"},
                "b": {"type": "integer", "description": "the second number"},
            },
            "required": ["a"],
        },
    }
    assert list(two.parameters["properties"]) == ["unit"]  # type: ignore[call-overload]  # the episode gives the problem
    assert two.find_argument_error({"unit": "h"}) == "argument unit of later: 'h' is not one of ['s', 'ms']"
    assert one.find_argument_error({"a": 1, "c": 2}) == (
        "arguments of add: Additional properties are not allowed ('c' was unexpected)"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_types", "its parameter 'a' has no type"),
        ("no_docstring", "it has no docstring"),
        ("no_description", "does not describe the parameter 'a' under Args:"),
        ("many", "its parameter 'numbers' cannot be passed by name"),
        ("unknown_type", r"its annotations cannot be evaluated \(name 'Nowhere' is not defined\)"),
        ("AsksTooMuch", "__init__ requires 'database'; valid parameters: problem, sandbox"),
        ("NoTools", "NoTools has no public methods, so it has no tools"),
    ],
)
def test_what_cannot_be_a_tool_is_one_message(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=rf"environment.tools '{HERE}:{name}'.*") as caught:
        load_tools((f"{HERE}:{name}",))
    assert "\n" not in str(caught.value)
    caught.match(message)


PROGRAM = """
import sys
from agentrl_envs.tools.schema import function_schema
def f(a: int) -> str:
    "Does it.\\n\\nArgs:\\n    a: a number"
function_schema(f, "f")
print("torch" in sys.modules)
"""


def test_a_schema_is_read_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def of_many_types(
    texts: list[str],
    count: int,
    ratio: float,
    on: bool,
    unit: Literal["s", "ms"] = "s",
    more: dict[str, int] = {},  # noqa: B006
) -> str:
    """Takes much.

    Args:
        texts: several
            texts
        count: a number
        ratio: a ratio
        on: a switch
        unit: a unit
        more: more numbers

    Returns:
        nothing
    """
    return ""


@pytest.mark.parametrize("function", [add, meet, of_many_types])
def test_schemas_are_those_of_transformers(function: Callable[..., object]) -> None:
    theirs = get_json_schema(function)["function"]
    ours = function_schema(function, "f").as_openai_function()["function"]
    assert ours["description"] == theirs["description"]  # type: ignore[index]
    properties = ours["parameters"]["properties"]  # type: ignore[index]
    for name, expected in theirs["parameters"]["properties"].items():
        assert {key: properties[name].get(key) for key in expected} == expected | {
            "description": properties[name]["description"]
        }
    assert ours["parameters"].get("required") == theirs["parameters"].get("required")  # type: ignore[index]


async def test_functions_of_every_kind_are_called() -> None:
    async with episode("add", "later", "pieces", "late_pieces") as made:
        assert await said(
            made, call("add", a=2), call("later", unit="s"), call("pieces", count=2), call("late_pieces")
        ) == ["3", '{"unit": "s", "rows": [1, 2, 3]}', "0;1;", "0;1;"]


async def test_calls_of_one_turn_run_at_the_same_time() -> None:
    async with episode("meet") as made:
        assert await said(made, call("meet"), call("meet")) == ["met", "met"]


async def test_an_instance_belongs_to_its_episode_and_to_one_thread() -> None:
    async with episode("Shop") as one, episode("Shop") as two:
        assert Shop.open_shops == 2
        assert await said(one, call("insert", number=9), call("query", sql="select sum(number) from shop")) == [
            "inserted",
            "[[15]]",
        ]
        assert await said(two, call("query", sql="select count(*) from shop")) == ["[[3]]"]
        wrong = await said(two, call("query", sql="select missing"))
        assert wrong == ["OperationalError: no such column: missing"]
    assert Shop.open_shops == 0


async def test_a_fork_has_the_state_and_its_own_future() -> None:
    async with episode("Shop", "Counter") as made:
        await made.step(call("insert", number=4) + call("count_up"))
        twin = await made.fork()
        await made.step(call("insert", number=5) + call("count_up"))
        count = call("query", sql="select count(*) from shop")
        assert await said(twin, count, call("count_up")) == ["[[4]]", "2"]
        assert await said(made, count, call("count_up")) == ["[[5]]", "3"]
        await twin.close()


async def test_a_fork_may_be_asynchronous_and_must_return_a_copy() -> None:
    async with episode("ForksLater") as made:
        await made.step(call("count_up"))
        twin = await made.fork()
        assert await said(twin, call("count_up")) == ["2"]
        await twin.close()
    async with episode("ForksNothing") as made:
        with pytest.raises(ToolError, match=r"fork\(\) of ForksNothing returned None; it must return another ForksNo"):
            await made.fork()


async def test_a_fork_that_fails_closes_what_it_has_copied() -> None:
    async with episode("Shop", "Busy") as made:
        assert Shop.open_shops == 1
        with pytest.raises(UnavailableError, match="no room"):
            await made.fork()
        assert Shop.open_shops == 1
        assert await said(made, call("query", sql="select 7")) == ["[[7]]"]


@pytest.mark.parametrize("how", ["gone", "gone too", "said"])
async def test_an_unreachable_service_is_an_infrastructure_failure(how: str) -> None:
    async with episode("fails") as made:
        step = await made.step(call("fails", how=how))
        assert (step.ended, step.observation) == (Ended.INFRASTRUCTURE_FAILURE, "")


async def test_an_error_is_an_observation_and_a_bug_is_not() -> None:
    async with episode("fails") as made:
        assert await said(made, call("fails", how="value")) == ["ValueError: no such row"]
        with pytest.raises(ToolError, match=r"the tool 'fails' raised NameError: name 'x' is not defined \(.*:\d+\)"):
            await made.step(call("fails", how="bug"))


async def test_a_class_that_cannot_be_made_is_a_bug_of_the_tool() -> None:
    with pytest.raises(ToolError, match=r"creating Broken raised OSError: no disk"):
        async with episode("Broken"):
            pass


async def test_a_tool_that_holds_the_event_loop_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calling, "BLOCKED_SECONDS", -1.0)
    monkeypatch.setattr(calling, "_reported_tools", set())
    with caplog.at_level(logging.WARNING):
        async with episode("rude") as made:
            await made.step(call("rude") + call("rude"))
    (message,) = [record.message for record in caplog.records if record.name == calling.logger.name]
    assert message.startswith("the tool 'rude' blocked the event loop, and with it all rollouts, for ")
    assert "Make it a synchronous function, which runs in a thread" in message


class Echo:
    """A sandbox that answers with what it was asked."""

    isolation = None

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def execute(self, program: str, **options: Any) -> Execution:
        self.asked.append(options)
        return Execution(
            outcome=Outcome.OK, stdout=f"ran {program}", stderr="", exit_code=0, seconds=0.0, truncated=False
        )


@pytest.mark.parametrize("name", ["runs", "blocks"])
async def test_a_tool_gets_the_sandbox_where_it_asks_for_it(name: str) -> None:
    sandbox = Echo()
    async with episode(name, sandbox=sandbox, execution_timeout=7.0) as made:
        assert await said(made, call(name, code="1 + 1")) == ["ran 1 + 1"]
    (asked,) = sandbox.asked
    assert asked["timeout"] == 7.0
    if name == "runs":
        assert (asked["files"], asked["fetch_files"]) == ({"in.txt": b"1"}, ("out.txt",))
