"""The same agent in each API: two questions with a tool, then an edited history. And one that changes between them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
from openai.types.chat import ChatCompletionMessage

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "Add two numbers."}
CHAT_TOOL: Any = {"type": "function", "function": {**ADD, "parameters": SCHEMA}}
MESSAGES_TOOL: Any = {**ADD, "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", **ADD, "parameters": SCHEMA, "strict": False}
TURNS = 3


@asynccontextmanager
async def claude(base_url: str, api_key: str, **more: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, **more) as policy:
        yield policy


async def chat(problem: Any, *, base_url: str, api_key: str, model: str, stream: bool = False) -> float:
    """Chat Completions; every history is sent back as it came."""
    messages: Any = [{"role": "user", "content": problem.statement}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:

        async def ask() -> Any:
            asked: Any = {"model": model, "messages": messages, "tools": [CHAT_TOOL]}
            if stream:
                return await _joined(await policy.chat.completions.create(**asked, stream=True))
            return (await policy.chat.completions.create(**asked)).choices[0].message

        for _ in range(TURNS):
            reply = await ask()
            messages.append({"role": "assistant", **reply.model_dump(include={"content", "tool_calls"})})
            messages += [{"role": "tool", "content": "5", "tool_call_id": call.id} for call in reply.tool_calls or []]
            messages.append({"role": "user", "content": "more"})
        messages[1]["content"] = "forgotten"
        await ask()
    return 0.5


async def _joined(chunks: Any) -> ChatCompletionMessage:
    """The message of a stream, whose calls come whole."""
    deltas = [choice.delta for chunk in [chunk async for chunk in chunks] for choice in chunk.choices]
    calls = [{**call.to_dict(), "type": "function"} for delta in deltas for call in delta.tool_calls or []]
    return ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": "".join(one.content or "" for one in deltas), "tool_calls": calls or None}
    )


async def messages(problem: Any, *, base_url: str, api_key: str, model: str, stream: bool = False) -> float:
    """Messages, with reasoning enabled."""
    said: Any = [{"role": "user", "content": problem.statement}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with claude(base_url, api_key) as policy:

        async def ask() -> Any:
            asked: Any = {"model": model, "max_tokens": 2048, "messages": said, "tools": [MESSAGES_TOOL]}
            asked |= {"thinking": thinking, "system": [{"type": "text", "text": "Add."}, {"type": "text", "text": "!"}]}
            if stream:
                async with policy.messages.stream(**asked) as events:
                    return await events.get_final_message()
            return await policy.messages.create(**asked)

        for _ in range(TURNS):
            reply = await ask()
            said.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            said.append({"role": "user", "content": [*results, {"type": "text", "text": "more"}]})
        said[1]["content"] = "forgotten"
        await ask()
    return 0.5


async def responses(
    problem: Any, *, base_url: str, api_key: str, model: str, stream: bool = False, stored: bool = False
) -> float:
    """Responses; the history is sent back, or with ``stored`` referred to by its id."""
    said: Any = [{"role": "user", "content": problem.statement}]
    previous: Any = {}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:

        async def ask() -> Any:
            asked: Any = {"model": model, "input": said, "tools": [RESPONSES_TOOL], "instructions": "Add.", **previous}
            if not stream:
                return await policy.responses.create(**asked)
            events = [event async for event in await policy.responses.create(**asked, stream=True)]
            return events[-1].response

        for _ in range(TURNS):
            reply = await ask()
            items = [item.to_dict() for item in reply.output]
            said = [] if stored else [*said, *items]
            previous = {"previous_response_id": reply.id} if stored else {}
            said += [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
                for item in items
                if item["type"] == "function_call"
            ]
            said.append({"role": "user", "content": [{"type": "input_text", "text": "more"}]})
        previous = {}
        said = [{"role": "user", "content": problem.statement}, {"role": "assistant", "content": "forgotten"}, *said]
        await ask()
    return 0.5


async def streamed_chat(problem: Any, **access: Any) -> float:
    return await chat(problem, **access, stream=True)


async def streamed_messages(problem: Any, **access: Any) -> float:
    return await messages(problem, **access, stream=True)


async def streamed_responses(problem: Any, **access: Any) -> float:
    return await responses(problem, **access, stream=True)


async def stored_responses(problem: Any, **access: Any) -> float:
    return await responses(problem, **access, stored=True)


async def changing(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """One conversation, whose every turn is asked in another API."""
    question = {"role": "user", "content": problem.statement}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy, claude(base_url, api_key) as other:
        asked: Any = {"model": model, "messages": [question], "tools": [CHAT_TOOL]}
        first = (await policy.chat.completions.create(**asked)).choices[0].message
        calls = first.tool_calls or []
        used = [
            {"type": "tool_use", "id": one.id, "name": "add", "input": json.loads(one.function.arguments)}
            for one in calls
        ]
        said: Any = [{"type": "text", "text": first.content}] if first.content else []
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": "5"} for one in calls]
        turns: Any = [
            question,
            {"role": "assistant", "content": [*said, *used]},
            {"role": "user", "content": [*results, {"type": "text", "text": "more"}]},
        ]
        second = await other.messages.create(model=model, max_tokens=2048, messages=turns, tools=[MESSAGES_TOOL])
        items: Any = [
            question,
            {"type": "message", "role": "assistant", "content": first.content or ""},
            *(
                {
                    "type": "function_call",
                    "call_id": one.id,
                    "name": one.function.name,
                    "arguments": one.function.arguments,
                }
                for one in calls
            ),
            *({"type": "function_call_output", "call_id": one.id, "output": "5"} for one in calls),
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "".join(one.text for one in second.content if one.type == "text")},
            {"role": "user", "content": "and more"},
        ]
        await policy.responses.create(model=model, input=items, tools=[RESPONSES_TOOL])
    return 0.5
