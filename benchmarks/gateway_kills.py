"""Kill agents and the engine at random moments, and check which replies are trained on.

    python benchmarks/gateway_kills.py [--kills 40] [--seed 0]

Every agent is a process that asks four questions with the package openai, every second one streamed, and writes the
replies that it received to a file before it ends. The engine is a process, too. A kill is a SIGKILL to the engine or to
one of the agents, after up to eight replies and up to 50 ms. The driver repeats a rollout whose agent was killed, and
the engine is started again. Every reply contains a number that no other reply contains.

Target: every rollout is played to its end by one agent that was not killed. Its rows train the replies that this agent
received, each exactly once, and no other reply. No process or descriptor is left. Otherwise, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil
from scripted import ScriptedEngine, written

from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.base import Completion, EngineError, Sampling
from agentrl.rollout.gateway.environment import AgentEnvironment, program_for_environment
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.types import Problem

PROBLEMS, SAMPLES, TURNS = 4, 8, 4
MOST_REPLIES, MOST_SECONDS = 8, 0.05  # between two kills
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ '\n' }}{% endfor %}<|assistant|>"
ENGINE = """
import os, random, sys, time
for number, line in enumerate(sys.stdin):
    time.sleep(random.uniform(0, 0.03))
    print(line.strip(), f"reply {os.getpid()}-{number}", flush=True)
"""
AGENT = f"""
import json, os, sys
import openai

messages, received = [{{"role": "user", "content": os.environ["AGENTRL_STATEMENT"]}}], []
with openai.OpenAI(max_retries=9) as policy:
    for turn in range({TURNS}):
        asked = {{"model": os.environ["OPENAI_MODEL"], "messages": messages}}
        if turn % 2:
            with policy.chat.completions.stream(**asked) as stream:
                text = stream.get_final_completion().choices[0].message.content
        else:
            text = policy.chat.completions.create(**asked).choices[0].message.content
        received.append(text)
        messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": "Go on."}}]
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([os.getpid(), received]) + "\\n")
print(1.0)
"""


class ProcessEngine(ScriptedEngine[None]):
    """Samples in a separate process, one request after another. Starts a new process if the previous one has ended."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__()
        self._codec = codec
        self._turn = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None
        self.replies = 0

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, *, trajectory_id: str, request_id: str, seed: int
    ) -> Completion:
        async with self._turn:
            pipe = subprocess.PIPE
            if self.process is None:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", ENGINE, stdin=pipe, stdout=pipe
                )
            process = self.process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(request_id.encode() + b"\n")
            while line := (await process.stdout.readline()).decode():
                answered, _, text = line.partition(" ")
                self.replies += 1
                if answered == request_id:  # otherwise, the client of this reply has disconnected
                    return written(self._codec, text.strip(), ended=True)
            await self.stop()
            raise EngineError("the engine's process was killed")

    async def stop(self) -> None:
        """Close the input of the process and wait until it has ended."""
        process, self.process = self.process, None
        if process is not None:
            await process.communicate(b"")  # closes the input


async def kill_at_random(
    engine: ProcessEngine, draw: random.Random, kills: Counter[str], killed: set[int], wanted: int
) -> None:
    """Kill the engine or an agent, ``wanted`` times. Counts both in ``kills`` and adds the agents to ``killed``."""
    this = psutil.Process()
    while kills.total() < wanted:
        awaited = engine.replies + draw.randint(1, MOST_REPLIES)
        while engine.replies < awaited:
            await asyncio.sleep(0.001)
        await asyncio.sleep(draw.uniform(0.0, MOST_SECONDS))
        serving = engine.process.pid if engine.process is not None else 0
        agents = [one.pid for one in this.children() if one.pid != serving and one.status() != psutil.STATUS_ZOMBIE]
        chosen = "engine" if draw.random() < 0.5 else "agent"
        if chosen == "engine" and serving and psutil.Process(serving).status() != psutil.STATUS_ZOMBIE:
            psutil.Process(serving).kill()
        elif chosen == "agent" and agents:
            pid = draw.choice(sorted(agents))
            psutil.Process(pid).kill()
            killed.add(pid)
        else:
            continue
        kills[chosen] += 1


async def play(kills_wanted: int, seed: int, folder: Path) -> bool:
    """Run steps until all kills have happened, and print a summary. Returns True if the target is met."""
    tokenizer = train_tokenizer([TEMPLATE, "reply 0123456789- Go on."], vocabulary_size=320)
    codec = TextCodec(tokenizer)
    engine, killed, kills = ProcessEngine(codec), set[int](), Counter[str]()
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    journal = folder / "received.jsonl"
    limits = AgentGatewaySettings(agent_rewards=True)
    env = f"agent:{sys.executable} {folder}/agent.py {journal}"
    settings = RolloutSettings(concurrency=16, retries=20)
    descriptors = len(os.listdir("/proc/self/fd"))
    environment = AgentEnvironment(
        program_for_environment(env, {}, limits), limits, ChatRenderer(tokenizer, codec, template=TEMPLATE)
    )
    await environment.open()
    driver = Driver(environment=environment, engine=engine, codec=codec, settings=settings, seed=seed)
    killing = asyncio.create_task(kill_at_random(engine, random.Random(seed), kills, killed, kills_wanted))
    rows: list[Trajectory] = []
    expected = 0
    while not killing.done():
        problems = [Problem(id=str(n), statement=f"Begin {n}.", answer=None, source="kills") for n in range(PROBLEMS)]
        requests = [Group(index=expected + number, problem=one) for number, one in enumerate(problems)]
        async for group in driver.play_groups(requests, step=expected, group_size=SAMPLES):
            rows += group.all_trajectories
        expected += PROBLEMS * SAMPLES
    await killing
    await environment.close()
    await engine.stop()
    trained: dict[tuple[int, int], Counter[str]] = {}
    for row in rows:
        if not row.is_excluded:
            texts = "".join(part.text for part in row.segments if part.origin == "model")
            trained.setdefault((row.group, row.sample), Counter()).update(re.findall(r"reply \d+-\d+", texts))
    played = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    received = [Counter(texts) for _, texts in played]
    finished = [Counter(texts) for pid, texts in played if pid not in killed]
    twice = sum(count - 1 for count in sum(trained.values(), Counter[str]()).values())
    lost = sum(one not in trained.values() for one in finished)
    strange = sum(one not in received for one in trained.values())
    left = len(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd")) - descriptors
    print(
        f"seed {seed}, {kills.total()} kills ({kills['engine']} of the engine, {kills['agent']} of agents): of "
        f"{expected} rollouts, {len(trained)} were trained on; {len(finished)} agents finished, {lost} of them are "
        f"missing; {strange} rollouts differ from the replies to their agent; {twice} replies were trained on twice; "
        f"processes left: {left[0]}, descriptors left: {left[1]}"
    )
    return len(trained) == expected and not (lost or strange or twice or left[0]) and left[1] <= 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(not asyncio.run(play(arguments.kills, arguments.seed, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
