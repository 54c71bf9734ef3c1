"""The same agent in three frameworks, as a user would write it: add two numbers by a tool, then answer."""

from __future__ import annotations

import contextlib
from typing import Any

from rollout.gateway.agents import client

MOST_TURNS = 4


async def openai_agents(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """The OpenAI Agents SDK; it sends back what it got."""
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
    from agents.exceptions import AgentsException

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with client(base_url, api_key) as policy:
        spoken = OpenAIChatCompletionsModel(model=model, openai_client=policy)
        agent = Agent(name="adder", instructions="Add with the tool.", tools=[add], model=spoken)
        try:
            config = RunConfig(tracing_disabled=True)
            result = await Runner.run(agent, problem.statement, run_config=config, max_turns=MOST_TURNS)
        except AgentsException:
            return 0.0  # no answer after so many turns
    return float(problem.answer in str(result.final_output))


def smolagents_tools(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """smolagents with tools; it sends calls back as text behind the reply, so that no reply is found again."""
    from smolagents import ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    return _smolagents(ToolCallingAgent, [add], problem, base_url=base_url, api_key=api_key, model=model)


def smolagents_code(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """smolagents with programs in place of calls."""
    from smolagents import CodeAgent

    return _smolagents(CodeAgent, [], problem, base_url=base_url, api_key=api_key, model=model)


def _smolagents(kind: Any, tools: list[Any], problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    from smolagents import AgentError, LogLevel, OpenAIModel

    policy = OpenAIModel(model_id=model, api_base=base_url, api_key=api_key)
    with contextlib.closing(policy.client):
        agent = kind(tools=tools, model=policy, max_steps=MOST_TURNS, verbosity_level=LogLevel.OFF)
        try:
            return float(problem.answer in str(agent.run(problem.statement)))
        except AgentError:
            return 0.0
