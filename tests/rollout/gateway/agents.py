"""Agent programs of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import urllib.request
from functools import cache
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


@cache
def kept() -> Any:
    return openai.DefaultAsyncHttpxClient()


async def keeping(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """As ask, with one HTTP client for all rollouts of the process."""
    policy = client(base_url, api_key, http_client=kept())
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


NOTICED = threading.Event()


async def rude(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    """As ask, after a wait that holds the event loop."""
    held(NOTICED)
    return await ask(problem, base_url=base_url, api_key=api_key, model=model)


def held(event: threading.Event) -> None:
    assert event.wait(60)


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


async def extravagant(problem: Any, *, base_url: str, api_key: str, model: str) -> float:
    await ask(problem, base_url=base_url, api_key=api_key, model=model)
    return 1e308


async def wrong(problem: Any) -> float:
    return 0.0


async def work() -> None:
    """A worker: ask the gateway for rollouts and play each, several at once. A problem without words fails."""
    url, key = os.environ["AGENTRL_GATEWAY_URL"], os.environ["AGENTRL_GATEWAY_KEY"]

    async def play(rollout: Any) -> None:
        place, problem = f"/{rollout['rollout_id']}", rollout["problem"]
        if not problem["statement"]:
            await post(f"{place}/finish", {"error": "there are no words"})
            return
        async with client(rollout["base_url"], rollout["api_key"]) as policy:
            asked: Any = [{"role": "user", "content": problem["statement"]}]
            reply = await policy.chat.completions.create(model=rollout["model"], messages=asked)
        await post(f"{place}/reward", {"reward": float("x" in (reply.choices[0].message.content or ""))})
        await post(f"{place}/finish", {})

    async def post(path: str, body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/rollouts{path}", json.dumps(body).encode(), headers)
        return await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())

    async with asyncio.TaskGroup() as group:
        while True:
            if given := await post("", {"wait": 5}):
                group.create_task(play(json.loads(given)))


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        asyncio.run(work())
    told = json.loads(os.environ["AGENTRL_PROBLEM"])
    with openai.OpenAI() as policy:
        asked: Any = [{"role": "user", "content": told["statement"]}]
        answer = policy.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=asked)
    print("thinking aloud", file=sys.stderr)
    print(f"the answer\n{float('x' in (answer.choices[0].message.content or ''))}")
