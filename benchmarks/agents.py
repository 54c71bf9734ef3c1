"""Train the tiny policy through clients of the three APIs, and print a table of its rewards.

    python benchmarks/agents.py [--clients openai openai_own responses messages agents_sdk smolagents verifiers]

The task is to say whether a number is even or odd. A cold start on 600 demonstrations, seven of twenty of them wrong,
teaches the form; rewards teach which answer is right. `openai_own` opens an HTTP client for each rollout; in each other
client, all rollouts share one. The client `verifiers` needs AGENTRL_VERIFIERS_PYTHON, the Python of an environment with
verifiers 0.4. Each client's agent is in `benchmarks/agents_clients.py`.

Target: the mean reward of the last five steps is at least 0.1 above the mean reward of the first five, after ten steps
or more. Otherwise, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from agents_clients import INSTRUCTION, SMOLAGENTS_INSTRUCTION

CLIENTS = ("openai", "openai_own", "responses", "messages", "agents_sdk", "smolagents", "verifiers")
TARGET = 0.1
WRONG = 0.35
# Templates of the question and of the answer in each client's agent.
ASKED = {
    "openai": ("{}", "{}"),
    "openai_own": ("{}", "{}"),
    "responses": ("{}", "{}"),
    "messages": ("{}", "{}"),
    "agents_sdk": (f"{INSTRUCTION}\n{{}}", "{}"),
    "smolagents": (f"{SMOLAGENTS_INSTRUCTION}\nNew task:\n{{}}", '<code>\nfinal_answer("{}")\n</code>'),
    "verifiers": ("{}", "{}"),
}
TASKS = """
import json
from pathlib import Path

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    answer: str = ""


class NumberTask(vf.Task[NumberData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        with Path(__file__).with_name("problems.jsonl").open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                yield NumberTask(NumberData(prompt=row["problem"], answer=row["answer"]), self.config.task)


__all__ = ["NumberTaskset"]
"""
SETTINGS = [
    "data.train.0.path=problems.jsonl",
    "coldstart.demonstrations=demonstrations.jsonl",
    "coldstart.steps=120",
    "coldstart.direct_share=0",
    "rollout.problems_per_step=8",
    "rollout.group_size=8",
    "rollout.max_turn_tokens=24",
    "optimizer.learning_rate=0.001",
    "training.threads=1",
    "evaluation.samples=1",
    "evaluation.every=0",
    "telemetry.plots=false",
]


def answer_of(number: int) -> str:
    """Return the right answer."""
    return "odd" if number % 2 else "even"


def write_data(folder: Path, client: str) -> None:
    """Write problems, and demonstrations in the client's wording."""
    draw = random.Random(0)
    question, reply = ASKED[client]
    with (folder / "problems.jsonl").open("w") as problems, (folder / "demonstrations.jsonl").open("w") as shown:
        for number in draw.sample(range(10, 1000), 600):
            text, right = f"Is {number} even or odd?", answer_of(number)
            said = answer_of(number + (draw.random() < WRONG))
            problems.write(json.dumps({"problem": text, "answer": right}) + "\n")
            turn = {"model": reply.format(said)}
            shown.write(json.dumps({"problem": question.format(text), "answer": right, "turns": [turn]}) + "\n")
    (folder / "numbers_taskset.py").write_text(TASKS)
    # The agents run outside this folder, because this file has the name of the Agents SDK's package.
    shutil.copy(Path(__file__).with_name("agents_clients.py"), folder)


def train(client: str, steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """Train a new run. Returns the mean reward and the seconds of each step."""
    write_data(folder, client)
    env = f"agent:agents_clients:{client}"
    further = ["coldstart.steps=240"] if client == "smolagents" else []  # its replies are programs
    if client == "verifiers":
        env = "verifiers:numbers_taskset"
        # Each rollout of this client starts a process.
        further = [f"environment.python={os.environ['AGENTRL_VERIFIERS_PYTHON']}", "rollout.problems_per_step=4"]
    command = [sys.executable, "-m", "agentrl.cli", "train", "--env", env, *SETTINGS, *further]
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([*command, f"training.steps={steps}", "name=run"], check=True, cwd=folder, env=environment)
    rows = [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").open()]
    trained = [row for row in rows if "reward/mean" in row]
    return [row["reward/mean"] for row in trained], [row["time/step_s"] for row in trained]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    lines = ["| client | mean reward of the first 5 steps | of the last 5 | seconds a step | in all |"]
    lines.append("|---|---|---|---|---|")
    learned = []
    for client in arguments.clients:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rewards, seconds = train(client, arguments.steps, Path(folder))
        if len(rewards) < arguments.steps:
            raise SystemExit(f"{client}: the agents failed")
        first, last = fmean(rewards[:5]), fmean(rewards[-5:])
        learned.append(last >= first + TARGET or arguments.steps < 10)
        total = time.monotonic() - began
        lines.append(f"| {client} | {first:.2f} | {last:.2f} | {median(seconds):.1f} | {total:.0f} |")
    print("\n".join(lines))
    return int(not all(learned))


if __name__ == "__main__":
    sys.exit(main())
