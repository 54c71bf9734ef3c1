"""Agent programs of the tests."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def client(base_url: str, api_key: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **more)


async def ask(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """Ask once; an x in the answer is worth 1."""
    async with client(base_url, api_key) as policy:
        messages: Any = [{"role": "user", "content": problem.statement}]
        reply = await policy.chat.completions.create(model=model, messages=messages)
    return float("x" in (reply.choices[0].message.content or ""))


async def branching(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """Ask twice in one conversation, then edit it: two sequences."""
    async with client(base_url, api_key) as policy:
        messages: Any = [{"role": "user", "content": problem.statement}]
        for more in ("again", "once more"):
            reply = await policy.chat.completions.create(model=model, messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [{"role": "user", "content": more}]
        messages[1]["content"] = "forgotten"
        reply = await policy.chat.completions.create(model=model, messages=messages)
    return float(problem.id.endswith("0"))


def blocking(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """As ask, with a client that blocks."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as policy:
        messages: Any = [{"role": "user", "content": problem.statement}]
        reply = policy.chat.completions.create(model=model, messages=messages)
    return float("x" in (reply.choices[0].message.content or ""))


async def crashing(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    raise KeyError("no such tool")


async def silent(problem: Any, *, base_url: str, api_key: str, model: str) -> None:
    await ask(problem, base_url=base_url, api_key=api_key, model=model)


async def endless(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """Talk until the gateway stops it."""
    async with client(base_url, api_key) as policy:
        messages: Any = [{"role": "user", "content": problem.statement}]
        while True:
            reply = await policy.chat.completions.create(model=model, messages=messages)
            said = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]


async def wrong(problem: Any) -> float:
    return 0.0


if __name__ == "__main__":
    told = json.loads(os.environ["AGENTRL_PROBLEM"])
    with openai.OpenAI() as policy:
        asked: Any = [{"role": "user", "content": told["statement"]}]
        answer = policy.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=asked)
    print("thinking aloud", file=sys.stderr)
    print(f"the answer\n{float('x' in (answer.choices[0].message.content or ''))}")
