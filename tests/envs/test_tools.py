"""Tools of users' own under the hermes protocol: found, checked, called, and what they do wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envs_chat import CHAT

from agentrl_envs.grading import GraderSettings
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment, SimpleTIREpisode
from agentrl_envs.tools import ToolError, ToolSchema, load_tools
from agentrl_envs.types import Ended, Problem

HERE = __name__


class Lookup:
    """The value of a constant."""

    name = "lookup"
    description = "The value of a constant."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"constant": {"type": "string"}, "digits": {"type": "integer"}},
        "required": ["constant"],
    }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        match arguments["constant"]:
            case "pi":
                return "3.14159265358979"[: 2 + arguments.get("digits", 2)]
            case "slow":
                await asyncio.Event().wait()
            case "error":
                raise ZeroDivisionError("oops")
            case "bug":
                raise AttributeError("oops")
            case "number":
                return 3  # type: ignore[return-value]
            case "set":
                return {3}  # type: ignore[return-value]
            case "half":
                return "\ud800"
        return "no such constant"


class NoName(Lookup):
    name = "no name"


class BadSchema(Lookup):
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"constant": {"type": "text"}}}


class NoSchema(Lookup):
    parameters: Mapping[str, Any] = {"type": "string"}


class Blocking(Lookup):
    def call(self, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]
        return "5"


instance = Lookup()
NUMBER = 5


def test_tools_are_found_by_name() -> None:
    tools = load_tools(("python", f"{HERE}:Lookup"))
    assert [schema.name for schema in tools.schemas] == ["python", "lookup"]
    assert [schema.name for schema in load_tools((f"{HERE}:instance",)).schemas] == ["lookup"]
    assert tools.schemas[1].as_openai_function() == {
        "type": "function",
        "function": {"name": "lookup", "description": Lookup.description, "parameters": Lookup.parameters},
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("pyton",), "unknown tool 'pyton'; did you mean 'python'? (valid: python, module:attribute)"),
        (("nowhere:Tool",), "there is no module 'nowhere'"),
        ((f"{HERE}:Lokup",), "has no 'Lokup'; did you mean 'Lookup'"),
        ((f"{HERE}:NUMBER",), "cannot be a tool: it is a int, but must be a function or a class"),
        ((f"{HERE}:NoName",), "its name 'no name' must consist of"),
        ((f"{HERE}:NoSchema",), 'a JSON schema with "type": "object"'),
        ((f"{HERE}:BadSchema",), "its parameters are not a JSON schema: 'text' is not valid under"),
        ((f"{HERE}:Blocking",), "its call() method must be async"),
        ((f"{HERE}:Lookup", f"{HERE}:instance"), "two tools have the name 'lookup'"),
    ],
)
def test_what_is_no_tool_is_said(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(PluginError) as caught:
        load_tools(names)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"constant": "pi"}, None),
        ({"constant": "pi", "digits": 3.0, "more": []}, None),
        ({}, "arguments of lookup: 'constant' is a required property"),
        ({"constant": 3}, "argument constant of lookup: 3 is not of type 'string'"),
        ({"constant": "pi", "digits": True}, "argument digits of lookup: True is not of type 'integer'"),
        ({"constant": "pi", "digits": 2.5}, "argument digits of lookup: 2.5 is not of type 'integer'"),
    ],
)
def test_arguments_are_checked_before_the_call(arguments: dict[str, Any], refusal: str | None) -> None:
    schema = ToolSchema(name="lookup", description="", parameters=Lookup.parameters)
    assert schema.find_argument_error(arguments) == refusal


@asynccontextmanager
async def episode(**changes: Any) -> AsyncIterator[SimpleTIREpisode]:
    settings = SimpleTIRSettings(protocol="hermes", tools=(f"{HERE}:Lookup",), **changes)
    environment = SimpleTIREnvironment(settings, None, GraderSettings(workers=1), chat=CHAT)
    await environment.open()  # and no sandbox with it: nothing runs programs
    assert environment.describe()[:2] == [
        f"Hermes: up to 10 turns, {settings.execution_timeout:g} s a program",
        "tools: lookup",
    ]
    try:
        made = environment.episode(Problem(id="toy", statement="?", answer="5", source="toy"))
        await made.start()
        yield made
    finally:
        await environment.close()


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': arguments})}</tool_call>"


async def test_a_tool_is_called_and_its_text_is_shown() -> None:
    async with episode() as made:
        step = await made.step(call(constant="pi", digits=4))
        assert (step.observation, step.ended) == ("</a>\n<t>3.1415</t><a>", None)
        assert [one.outcome for one in step.tool_calls] == ["ok"]
        long = await made.step(call(constant="pi", digits=4) + call(constant="e"))
        assert long.observation == "</a>\n<t>3.1415|no such constant</t><a>"
        assert (await made.step("\\boxed{5}")).ended is Ended.ANSWERED


async def test_what_a_tool_says_is_cut_and_can_be_encoded() -> None:
    async with episode(observation_limit=4) as made:
        step = await made.step(call(constant="pi", digits=12) + call(constant="half"))
        assert step.observation == "</a>\n<t>3.\n[... output cut ...]\n89|?</t><a>"


async def test_a_tool_that_takes_too_long_is_an_observation() -> None:
    async with episode(execution_timeout=0.05) as made:
        step = await made.step(call(constant="slow"))
        assert step.observation == "</a>\n<t>TimeoutError: lookup did not answer in time</t><a>"
        assert [one.outcome for one in step.tool_calls] == ["timeout"]


@pytest.mark.parametrize(
    ("constant", "message"),
    [
        ("bug", r"the tool 'lookup' raised AttributeError: oops \(.*test_tools\.py:\d+\)"),
        ("set", r"the tool 'lookup' must return text or JSON, not set"),
    ],
)
async def test_a_bug_of_a_tool_is_told(constant: str, message: str) -> None:
    async with episode() as made:
        with pytest.raises(ToolError, match=message):
            await made.step(call(constant=constant))


async def test_an_error_of_a_tool_is_an_observation() -> None:
    async with episode() as made:
        step = await made.step(call(constant="error") + call(constant="number"))
        assert step.observation == "</a>\n<t>ZeroDivisionError: oops|3</t><a>"
        assert [one.outcome for one in step.tool_calls] == ["error", "ok"]


def test_python_is_not_called_where_it_is_not_offered() -> None:
    schemas: Callable[[str], Any] = load_tools((f"{HERE}:Lookup",)).schema
    assert schemas("python") is None
