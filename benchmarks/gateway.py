"""CPU time, memory and descriptors of the gateway with many concurrent agents, for each API.

    python benchmarks/gateway.py [--agents 256] [--turns 10] [--waves 4] [--apis chat responses messages]

Agents run in a separate process and use the packages openai and anthropic. Every second request is streamed. The engine
is scripted, so the processor time of this process is the gateway's: HTTP, matching, the template, encoding, parsing the
reply and writing it. Every turn calls a tool whose answer has 200 characters; the system prompt is new for each agent,
and one reply in eight is edited. A wave starts new rollouts for all agents; by default, each API gets 10,240 requests.

Targets: less than 3 ms of CPU time per request for Chat Completions and 4 ms for the other APIs; memory grows by less
than 5 % from the second wave to the last; no descriptor is left. Otherwise, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time

import psutil
from scripted import ScriptedEngine, written

from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.types import Ended, Problem

TARGETS_MS = {"chat": 3.0, "responses": 4.0, "messages": 4.0}
GROWTH = 0.05
CALL = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}<|assistant|>"
)
AGENTS = """
import asyncio, json, sys
import anthropic, openai

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add two numbers."}
SYSTEM = "You are agent {}. " + "Be careful. " * 50
QUESTION = {"role": "user", "content": "Add one and two, again and again."}
EDITED = "I have edited this."
RESULT = "x" * 200

async def chat(policy, number, turns, model):
    tools = [{"type": "function", "function": {**ADD, "parameters": SCHEMA}}]
    messages = [{"role": "system", "content": SYSTEM.format(number)}, QUESTION]
    for turn in range(turns):
        asked = {"model": model, "messages": messages, "tools": tools}
        if (number + turn) % 2:
            async with policy.chat.completions.stream(**asked) as stream:
                said = (await stream.get_final_completion()).choices[0].message
        else:
            said = (await policy.chat.completions.create(**asked)).choices[0].message
        calls = [call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls]
        calls = [{**call, "function": {key: call["function"][key] for key in ("name", "arguments")}} for call in calls]
        content = EDITED if (number + turn) % 8 == 0 else said.content
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]

async def responses(policy, number, turns, model):
    tools = [{"type": "function", **ADD, "parameters": SCHEMA}]
    items = [QUESTION]
    for turn in range(turns):
        asked = {"model": model, "input": items, "tools": tools, "instructions": SYSTEM.format(number)}
        if (number + turn) % 2:
            async with policy.responses.stream(**asked) as stream:
                reply = await stream.get_final_response()
        else:
            reply = await policy.responses.create(**asked)
        for item in reply.output:
            if item.type == "message":
                text = EDITED if (number + turn) % 8 == 0 else item.content[0].text
                items.append({"role": "assistant", "content": text})
            else:
                call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
                items.append({"type": "function_call", **call})
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": RESULT})

async def messages(policy, number, turns, model):
    tools = [{**ADD, "input_schema": SCHEMA}]
    said = [QUESTION]
    for turn in range(turns):
        asked = {"model": model, "max_tokens": 512, "messages": said, "tools": tools, "system": SYSTEM.format(number)}
        if (number + turn) % 2:
            async with policy.messages.stream(**asked) as stream:
                reply = await stream.get_final_message()
        else:
            reply = await policy.messages.create(**asked)
        blocks = [block.to_dict() for block in reply.content]
        if (number + turn) % 8 == 0:
            blocks[0]["text"] = EDITED
        used = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one, "content": RESULT} for one in used]
        said += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]

async def main():
    told = json.load(sys.stdin)
    play = {"chat": chat, "responses": responses, "messages": messages}[told["api"]]
    if told["api"] == "messages":
        client = anthropic.DefaultAsyncHttpxClient()
        def opened(access):
            url = access["base_url"].removesuffix("/v1")
            return anthropic.AsyncAnthropic(base_url=url, api_key=access["api_key"], http_client=client, timeout=600)
    else:
        client = openai.DefaultAsyncHttpxClient()
        def opened(access):
            key = access["api_key"]
            return openai.AsyncOpenAI(base_url=access["base_url"], api_key=key, http_client=client, timeout=600)
    async with client:
        agents = enumerate(told["agents"])
        await asyncio.gather(*(play(opened(one), number, told["turns"], one["model"]) for number, one in agents))

asyncio.run(main())
"""


class CallingEngine(ScriptedEngine[None]):
    """Answers every request with the same call."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__()
        self._completion = written(codec, CALL, ended=True)

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, *, trajectory_id: str, request_id: str, seed: int
    ) -> Completion:
        await asyncio.sleep(0)
        return self._completion


async def play_wave(gateway: AgentGateway, renderer: ChatRenderer, api: str, agents: int, turns: int) -> float:
    """Run one rollout per agent. Returns the CPU seconds of this process."""
    settings = RolloutSettings(max_turn_tokens=4096, max_prompt_tokens=100_000, max_response_tokens=100_000)
    problem = Problem(id="toy-0", statement="1 + 2?", answer="3", source="toy")
    rollouts = [
        AgentRollout(
            policy=TokenPolicy(
                problem=problem,
                settings=settings,
                step=0,
                group=0,
                sample_index=number,
                name=f"r{number}",
                seed=0,
                start_time=0.0,
                engine=CallingEngine(renderer.codec),
                codec=renderer.codec,
            ),
            settings=settings,
            gateway=AgentGatewaySettings(max_generations=turns, deadline=3600.0),
            renderer=renderer,
        )
        for number in range(agents)
    ]
    for one in rollouts:
        gateway.register_rollout(one)
    told = json.dumps({"api": api, "turns": turns, "agents": [vars(one.access) for one in rollouts]})
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENTS, stdin=subprocess.PIPE)
    began = time.process_time()
    await process.communicate(told.encode())
    spent = time.process_time() - began
    sampled = sum(len(one.tree.generations) for one in rollouts)
    for one in rollouts:
        one.build_trajectories(Ended.ANSWERED)
        await one.reject_further_requests()
        gateway.unregister_rollout(one)
    if process.returncode or sampled != agents * turns:
        raise SystemExit("the agents failed")
    return spent


async def measure(api: str, agents: int, turns: int, waves: int) -> bool:
    """Measure one API. Returns True if all targets are met."""
    tokenizer = train_tokenizer([TEMPLATE, CALL, "You are an agent. Be careful. " * 4], vocabulary_size=512)
    renderer = ChatRenderer(tokenizer, TextCodec(tokenizer), template=TEMPLATE)
    descriptors = len(os.listdir("/proc/self/fd"))
    gateway = AgentGateway(AgentGatewaySettings())
    await gateway.open()
    spent, memory = 0.0, []
    for _ in range(waves):
        spent += await play_wave(gateway, renderer, api, agents, turns)
        gc.collect()
        memory.append(psutil.Process().memory_info().rss / 2**20)
    await gateway.close()
    left = len(os.listdir("/proc/self/fd")) - descriptors
    cost = 1000 * spent / (agents * turns * waves)
    grown = memory[-1] / memory[min(1, waves - 1)] - 1
    print(
        f"{api}: {agents} agents, {agents * turns * waves} requests: {cost:.2f} ms of CPU time per request (target: "
        f"below {TARGETS_MS[api]:g} ms); memory after each wave: {', '.join(f'{one:.0f}' for one in memory)} MiB; "
        f"descriptors left: {left}",
        flush=True,
    )
    return cost < TARGETS_MS[api] and grown < GROWTH and left <= 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--apis", nargs="+", choices=TARGETS_MS, default=list(TARGETS_MS))
    arguments = parser.parse_args()
    met = [asyncio.run(measure(api, arguments.agents, arguments.turns, arguments.waves)) for api in arguments.apis]
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
