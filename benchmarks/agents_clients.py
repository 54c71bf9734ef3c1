"""The agents of `benchmarks/agents.py`: one question, asked through each client as in the client's documentation."""

from __future__ import annotations

import contextlib
from functools import cache

import anthropic
import openai as openai_package

from agentrl_envs.types import Problem

INSTRUCTION = "You know numbers. Say one word."
SMOLAGENTS_INSTRUCTION = "You know numbers. Write code that gives final_answer one word."


@cache
def shared() -> openai_package.DefaultAsyncHttpxClient:
    """Return the HTTP client that all rollouts share, because creating one loads the machine's certificates."""
    return openai_package.DefaultAsyncHttpxClient()


async def openai(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """Agent with the openai package."""
    policy = openai_package.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared())
    return await asked(problem, policy, model)


async def openai_own(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """Agent with the openai package, with a new HTTP client for each rollout."""
    async with openai_package.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
        return await asked(problem, policy, model)


async def asked(problem: Problem, policy: openai_package.AsyncOpenAI, model: str) -> float:
    """Ask the policy, and return 1.0 for the correct answer, otherwise 0.0."""
    reply = await policy.chat.completions.create(model=model, messages=[{"role": "user", "content": problem.statement}])
    return float((reply.choices[0].message.content or "").strip() == problem.answer)


async def responses(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """Agent with the openai package and the Responses API."""
    policy = openai_package.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared())
    reply = await policy.responses.create(model=model, input=problem.statement)
    return float(reply.output_text.strip() == problem.answer)


@cache
def shared_anthropic() -> anthropic.DefaultAsyncHttpxClient:
    """Return the HTTP client that all rollouts share."""
    return anthropic.DefaultAsyncHttpxClient()


async def messages(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """Agent with the anthropic package and streaming."""
    url = base_url.removesuffix("/v1")
    policy = anthropic.AsyncAnthropic(base_url=url, api_key=api_key, http_client=shared_anthropic())
    said: list[anthropic.types.MessageParam] = [{"role": "user", "content": problem.statement}]
    async with policy.messages.stream(model=model, max_tokens=24, messages=said) as stream:
        reply = await stream.get_final_message()
    text = "".join(block.text for block in reply.content if block.type == "text")
    return float(text.strip() == problem.answer)


async def agents_sdk(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """Agent with the OpenAI Agents SDK."""
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner

    policy = openai_package.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared())
    spoken = OpenAIChatCompletionsModel(model=model, openai_client=policy)
    agent = Agent(name="numbers", instructions=INSTRUCTION, model=spoken)
    result = await Runner.run(agent, problem.statement, run_config=RunConfig(tracing_disabled=True))
    return float(str(result.final_output).strip() == problem.answer)


def smolagents(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """A CodeAgent of smolagents with a short system prompt. It answers with a program."""
    from smolagents import AgentError, CodeAgent, LogLevel, OpenAIModel

    policy = OpenAIModel(model_id=model, api_base=base_url, api_key=api_key)
    with contextlib.closing(policy.client):
        agent = CodeAgent(tools=[], model=policy, max_steps=1, verbosity_level=LogLevel.OFF)
        agent.prompt_templates["system_prompt"] = SMOLAGENTS_INSTRUCTION
        try:
            return float(str(agent.run(problem.statement)).strip() == problem.answer)
        except AgentError:
            return 0.0
