"""CPU time that the gateway adds to a turn of an agent, with many agents at once.

    python benchmarks/gateway.py [--agents 256] [--turns 10]

Agents run in a process of their own and use the openai package. The engine is scripted, so the processor time of this
process is the gateway's: HTTP, matching, the template, encoding, parsing the reply and writing it. Every turn calls a
tool whose answer has 200 characters; the system prompt is new for each agent, and one reply in eight is edited.

Target: less than 3 ms of CPU time a turn; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

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

TARGET_MS = 3.0
CALL = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}<|assistant|>"
)
AGENTS = """
import asyncio, json, sys
import openai

TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}

async def play(number, access, turns):
    async with openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"], timeout=600) as policy:
        messages = [{"role": "system", "content": f"You are agent {number}. " + "Be careful. " * 50},
                    {"role": "user", "content": "Add one and two, again and again."}]
        for turn in range(turns):
            reply = await policy.chat.completions.create(model=access["model"], messages=messages, tools=[TOOL])
            said = reply.choices[0].message
            messages.append({"role": "assistant", "content": said.content, "tool_calls": [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in said.tool_calls]})
            if (number + turn) % 8 == 0:
                messages[-1]["content"] = "I have edited this."
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "x" * 200} for call in said.tool_calls]

async def main():
    told = json.load(sys.stdin)
    await asyncio.gather(*(play(number, one, told["turns"]) for number, one in enumerate(told["agents"])))

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


async def measure(agents: int, turns: int) -> float:
    """Milliseconds of this process's CPU time for a turn."""
    tokenizer = train_tokenizer([TEMPLATE, CALL, "You are an agent. Be careful. " * 4], vocabulary_size=512)
    codec = TextCodec(tokenizer)
    renderer = ChatRenderer(tokenizer, codec, template=TEMPLATE)
    gateway = AgentGateway(AgentGatewaySettings())
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
                engine=CallingEngine(codec),
                codec=codec,
            ),
            settings=settings,
            gateway=AgentGatewaySettings(max_generations=turns, deadline=3600.0),
            renderer=renderer,
        )
        for number in range(agents)
    ]
    await gateway.open()
    told = json.dumps({"turns": turns, "agents": [vars(gateway.admit(one)) for one in rollouts]})
    program = [sys.executable, "-c", AGENTS]
    process = await asyncio.create_subprocess_exec(*program, stdin=subprocess.PIPE)
    began = time.process_time()
    await process.communicate(told.encode())
    spent = time.process_time() - began
    branches = sum(len(one.trajectories(Ended.ANSWERED)) for one in rollouts)
    for one in rollouts:
        await one.finish()
    await gateway.close()
    if process.returncode or sum(len(one.tree.generations) for one in rollouts) != agents * turns:
        raise SystemExit("the agents failed")
    print(f"{agents} agents, {agents * turns} turns, {branches} sequences")
    return 1000 * spent / (agents * turns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()
    spent = asyncio.run(measure(arguments.agents, arguments.turns))
    print(f"CPU time of the gateway: {spent:.2f} ms a turn (target: below {TARGET_MS:g} ms)")
    return int(spent >= TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
